// Host side of a launch: the driver that is loaded, and what it need not be told twice.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fp8cutlass {

// The driver's function of this name as it was in CUDA 12.0; null where it has none.
template <class Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
  return reinterpret_cast<Function>(entry);
}

// The number of the context that is current on this thread: no other context of the process ever has it, whereas a
// handle may come back. 0 where it is not known.
inline unsigned long long context_id() {
  static const auto id_of = driver_function<decltype(&cuCtxGetId)>("cuCtxGetId");
  unsigned long long id = 0;
  return id_of != nullptr && id_of(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

// Where a table of 64 entries keeps what belongs to an address.
inline unsigned slot_of(const void* address) {
  return unsigned((reinterpret_cast<uintptr_t>(address) >> 4) * 0x9e3779b97f4a7c15u >> 58);
}

// Opts a kernel in to more than the static 48 KB of shared memory. That belongs to a kernel in a context, and to set it
// costs some tenths of a microsecond: each thread remembers what it has set, so that none relies on another.
inline cudaError_t opt_in(const void* kernel, int smem_bytes, unsigned long long context) {
  struct Entry {
    const void* kernel;
    unsigned long long context;
  };
  static thread_local Entry entries[64];
  Entry& entry = entries[slot_of(kernel)];
  if (context != 0 && entry.kernel == kernel && entry.context == context) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status == cudaSuccess) entry = {kernel, context};
  return status;
}

}  // namespace fp8cutlass
