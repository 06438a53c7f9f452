// The CUDA device a call runs on: current device, current stream, size of the card.
#pragma once

#include <cuda_runtime_api.h>

namespace fp8cutlass {

// Makes `device` current and puts the caller's device back on the way out, exceptions included.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

// torch's current stream of `device`. Throws where the loaded torch was built without CUDA.
cudaStream_t current_stream(int device);

// While it lives, this thread may do what captures of streams forbid, allocate and load code: that is none of their
// business. Without it a capture in the mode "global", by whatever thread, would refuse.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode previous_ = cudaStreamCaptureModeRelaxed;
};

struct Capability {
  int major, minor;
};

Capability capability_of(int device);

// Whether a kernel may begin while the one before it in the stream runs.
inline bool runs_kernels_beside(int device) { return capability_of(device).major >= 9; }

// Multiprocessors of `device`, asked of the driver once per device. Safe to call from several threads.
int sm_count(int device);

// Throws, naming the variant, when a launch did not succeed. Clears the thread's last CUDA error first, so that the
// next call does not report this one's.
void check_launch(int status, const char* variant_id, int device);

}  // namespace fp8cutlass
