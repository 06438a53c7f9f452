#include "counters.h"

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "device.h"
#include "fp8cutlass/params.h"

namespace fp8cutlass {

namespace {

constexpr int kWords = 32;  // of a set: a cache line
constexpr int kSets = 1 << 14;
constexpr int kStreamSets = 1 << 9;  // the rest is for captured launches
constexpr int kHandover = 8;         // where in a set the words of handovers begin
constexpr int kReadySets = 1 << 9;
constexpr int kStreamReadySets = 1 << 7;
static_assert(kAttentionCounters <= kHandover && kHandover + kCounters <= kWords);

// Where a kind of launches, on streams or in captures, gets its words.
struct Share {
  int first, most;              // sets
  int first_ready, most_ready;  // of ready heads
};

constexpr Share kOfStreams{0, kStreamSets, 0, kStreamReadySets};
constexpr Share kOfCaptures{kStreamSets, kSets - kStreamSets, kStreamReadySets, kReadySets - kStreamReadySets};

struct Given {
  WorkCounters counters;
  std::mutex in_pairs;
};

template <class Key>
struct Sets {
  std::map<Key, Given> given;
  int ready = 0;
};

struct Pool {
  unsigned* memory = nullptr;
  bool failed = false;
  Sets<unsigned long long> of_stream;  // by its id: a handle may come back, or stand for a stream a thread
  Sets<std::pair<unsigned long long, cudaStream_t>> of_capture;
};

unsigned* allocate() {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  constexpr size_t kBytes = (size_t{kSets} * kWords + size_t{kReadySets} * kReadyHeads) * sizeof(unsigned);
  bool done = cudaMalloc(&memory, kBytes) == cudaSuccess;
  done = done && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
  done = done && cudaMemsetAsync(memory, 0, kBytes, stream) == cudaSuccess;
  done = done && cudaStreamSynchronize(stream) == cudaSuccess;
  if (stream != nullptr) cudaStreamDestroy(stream);
  if (!done) {
    cudaFree(memory);
    cudaGetLastError();
  }
  return done ? static_cast<unsigned*>(memory) : nullptr;
}

// The words of a key, new ones while there are any.
template <class Key>
WorkCounters words_of(const Pool& pool, Sets<Key>& sets, const Key& key, const Share& share, bool with_ready) {
  auto found = sets.given.find(key);
  if (found == sets.given.end()) {
    const int number = static_cast<int>(sets.given.size());
    if (number == share.most) return {};
    found = sets.given.try_emplace(key).first;
    unsigned* const words = pool.memory + size_t(share.first + number) * kWords;
    found->second.counters = {words, words + kHandover, nullptr, &found->second.in_pairs};
  }
  WorkCounters& counters = found->second.counters;
  if (with_ready && counters.ready == nullptr && sets.ready < share.most_ready)
    counters.ready = pool.memory + size_t{kSets} * kWords + size_t(share.first_ready + sets.ready++) * kReadyHeads;
  return counters;
}

}  // namespace

WorkCounters work_counters(int device, cudaStream_t stream, bool with_ready) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess) return {};
  const std::lock_guard<std::mutex> lock(mutex);
  Pool& pool = pools[device];
  if (pool.failed) return {};
  if (pool.memory == nullptr && (pool.memory = allocate()) == nullptr) {
    pool.failed = true;
    return {};
  }
  if (status == cudaStreamCaptureStatusNone) {
    unsigned long long id = 0;
    if (cudaStreamGetId(stream, &id) != cudaSuccess) return {};
    return words_of(pool, pool.of_stream, id, kOfStreams, with_ready);
  }
  return words_of(pool, pool.of_capture, std::pair(capture, stream), kOfCaptures, with_ready);
}

}  // namespace fp8cutlass
