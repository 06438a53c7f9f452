// The last step of every launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device.h"
#include "driver.h"

namespace fp8cutlass {

// Item numbers, and the rows and keys of a tile past the end, are 32-bit in the kernels.
constexpr int kTilePastEnd = 256;

struct LaunchShape {
  int64_t ctas;
  int threads, smem_bytes;
  int most_smem_bytes = 0;  // of any launch of the kernel, where they differ
};

// The kernel may begin while the one before it in the stream runs.
inline cudaLaunchAttribute runs_beside() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel on one struct of parameters, or what else `arguments` points to. `context` is context_id().
inline cudaError_t start(cudaKernel_t kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream,
                         unsigned long long context, cudaLaunchAttribute* attributes = nullptr, int count = 0) {
  constexpr int kWithoutOptIn = 48 * 1024;
  const int most = shape.most_smem_bytes > 0 ? shape.most_smem_bytes : shape.smem_bytes;
  if (most > kWithoutOptIn) {
    const cudaError_t status = opt_in(reinterpret_cast<const void*>(kernel), most, context);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.ctas));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

// The same of a kernel that waits for the one before it by itself.
inline cudaError_t start_beside(cudaKernel_t kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream,
                                unsigned long long context, int device) {
  cudaLaunchAttribute beside = runs_beside();
  return start(kernel, shape, arguments, stream, context, &beside, runs_kernels_beside(device) ? 1 : 0);
}

}  // namespace fp8cutlass
