#include "counters.h"

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace fp8cutlass {

namespace {

constexpr int kWords = 32;  // from pair to pair: a cache line each
constexpr int kPairs = 1 << 14;
constexpr int kStreamPairs = 1 << 9;  // the rest is for captured launches

struct Pool {
  unsigned* memory = nullptr;
  bool failed = false;
  std::map<unsigned long long, int> of_stream;  // by its id: a handle may come back, or stand for a stream a thread
  std::map<std::pair<unsigned long long, cudaStream_t>, int> of_capture;
};

// While any thread captures a stream, the allocation is refused unless this thread says that it is none of its
// business.
unsigned* allocate() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  constexpr size_t kBytes = size_t{kPairs} * kWords * sizeof(unsigned);
  bool done = cudaMalloc(&memory, kBytes) == cudaSuccess;
  done = done && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
  done = done && cudaMemsetAsync(memory, 0, kBytes, stream) == cudaSuccess;
  done = done && cudaStreamSynchronize(stream) == cudaSuccess;
  if (stream != nullptr) cudaStreamDestroy(stream);
  if (!done) {
    cudaFree(memory);
    cudaGetLastError();
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  return done ? static_cast<unsigned*>(memory) : nullptr;
}

unsigned* at(const Pool& pool, int pair) { return pool.memory + size_t(pair) * kWords; }

}  // namespace

unsigned* work_counters(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  Pool& pool = pools[device];
  if (pool.failed) return nullptr;
  if (pool.memory == nullptr && (pool.memory = allocate()) == nullptr) {
    pool.failed = true;
    return nullptr;
  }
  if (status == cudaStreamCaptureStatusNone) {
    unsigned long long id = 0;
    if (cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
    const auto known = pool.of_stream.find(id);
    if (known != pool.of_stream.end()) return at(pool, known->second);
    const int pair = static_cast<int>(pool.of_stream.size());
    if (pair == kStreamPairs) return nullptr;
    pool.of_stream.emplace(id, pair);
    return at(pool, pair);
  }
  const std::pair key(capture, stream);
  const auto known = pool.of_capture.find(key);
  if (known != pool.of_capture.end()) return at(pool, known->second);
  const int pair = kStreamPairs + static_cast<int>(pool.of_capture.size());
  if (pair == kPairs) return nullptr;
  pool.of_capture.emplace(key, pair);
  return at(pool, pair);
}

}  // namespace fp8cutlass
