#include "device.h"

#include <array>
#include <atomic>
#include <cstdint>

#include "check.h"

// Absent from CPU-only builds of torch, on which the extension must still load: hence weak.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace fp8cutlass {

namespace {

constexpr int kCachedDevices = 64;  // more than one host holds; devices past it are asked every time

void check_cuda(cudaError_t status, const char* what, int device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(what, " of CUDA device ", device, " failed: ", cudaGetErrorString(status));
}

int query_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "an attribute query", device);
  return value;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&previous_), "the current-device query ahead", device);
  if (previous_ == device) return;
  check_cuda(cudaSetDevice(device), "the selection", device);
  switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  // A failure cannot be thrown from here; it would come back from the caller's next CUDA call.
  if (switched_) cudaSetDevice(previous_);
}

cudaStream_t current_stream(int device) {
  require(aoti_torch_get_current_cuda_stream != nullptr, "the loaded torch was built without CUDA");
  void* stream = nullptr;
  const int32_t status = aoti_torch_get_current_cuda_stream(device, &stream);
  require(status == 0, "torch gave no current stream for CUDA device ", device, " (status ", status, ")");
  return static_cast<cudaStream_t>(stream);
}

RelaxedCapture::RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&previous_); }

RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&previous_); }

Capability capability_of(int device) {
  return {query_attribute(cudaDevAttrComputeCapabilityMajor, device),
          query_attribute(cudaDevAttrComputeCapabilityMinor, device)};
}

int sm_count(int device) {
  static std::array<std::atomic<int>, kCachedDevices> counts{};
  if (device >= kCachedDevices) return query_attribute(cudaDevAttrMultiProcessorCount, device);
  std::atomic<int>& cached = counts[device];
  int count = cached.load(std::memory_order_relaxed);
  if (count == 0) {
    // Two threads may both ask: they store the same number.
    count = query_attribute(cudaDevAttrMultiProcessorCount, device);
    cached.store(count, std::memory_order_relaxed);
  }
  return count;
}

void check_launch(int status, const char* variant_id, int device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaErrorNoKernelImageForDevice) {
    const Capability capability = capability_of(device);
    fail("kernel ", variant_id, " holds no code for CUDA device ", device, " (compute capability ", capability.major,
         ".", capability.minor, "): rebuild the extension with that architecture in FP8CUTLASS_ARCHS");
  }
  fail("kernel ", variant_id, " failed to launch on CUDA device ", device, ": ", cudaGetErrorString(error), " (",
       cudaGetErrorName(error), ")");
}

}  // namespace fp8cutlass
