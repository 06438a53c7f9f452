// A stand-in for the CUDA runtime and driver, which counts what is asked of them and keeps what was launched last.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fp8cutlass/sm90/kernel_params.h"
#include "fp8cutlass/sm90/resident_params.h"
#include "fp8cutlass/walk/plan_params.h"

namespace runtime {

struct Kernel {
  std::string library, name;
};

struct Launch {
  const Kernel* kernel;
  unsigned ctas, threads;
  size_t smem_bytes;
  bool dependent;  // it may begin before the kernel ahead of it has ended
  unsigned cluster;
  std::vector<uint8_t> first;  // bytes of the first argument
  int second;                  // of kernels that have two
  fp8cutlass::RaggedPack ragged;
  fp8cutlass::Bias bias;  // of kernels of warps that add one

  template <class Params>
  const Params& params() const {
    return *reinterpret_cast<const Params*>(first.data());
  }
};

inline unsigned long long context = 7;  // 0: there is none
inline int major = 9, minor = 0;        // of every device
inline int encoded = 0, opted_in = 0, loaded = 0, found = 0, brought = 0;
inline const void* refused = nullptr;  // the base of which no map can be made
inline cudaError_t next_load = cudaSuccess;
inline std::vector<Launch> launches;
inline std::mutex mutex;
inline std::map<std::string, Kernel> kernels;  // by library and name
inline std::map<std::string, std::string> libraries;
inline thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
inline bool capturing = false;         // a stream, in the mode "global"
inline std::atomic<int> conflicts{0};  // calls that a capture would have refused

inline void forbidden_in_captures() {
  if (capturing && mode != cudaStreamCaptureModeRelaxed) ++conflicts;
}

// A map is what it was made of: base, then sizes, strides and box.
inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* dims,
                             const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++encoded;
  if (base == refused) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  uint64_t* word = map->opaque;
  *word++ = reinterpret_cast<uintptr_t>(base);
  for (cuuint32_t i = 0; i < rank; ++i) *word++ = dims[i];
  for (cuuint32_t i = 0; i + 1 < rank; ++i) *word++ = strides[i];
  *word++ = uint64_t(box[0]) << 32 | box[1];
  *word = swizzle;
  return CUDA_SUCCESS;
}

// Bytes of a kernel's first argument, whose type its name ends with.
inline size_t argument_bytes(const std::string& name) {
  using namespace fp8cutlass;
  const std::pair<const char*, size_t> sizes[] = {{"12KernelParamsE", sizeof(sm90::KernelParams)},
                                                  {"13DeliverParamsE", sizeof(sm90::DeliverParams)},
                                                  {"13Fp8PackParamsE", sizeof(Fp8PackParams)},
                                                  {"10PackParamsE", sizeof(PackParams)},
                                                  {"13Fp8PackParamsENS_10RaggedPackE", sizeof(Fp8PackParams)},
                                                  {"10PackParamsENS_10RaggedPackE", sizeof(PackParams)},
                                                  {"10PlanParamsE", sizeof(planning::PlanParams)},
                                                  {"14ResidentLaunchE", sizeof(sm90::ResidentLaunch)},
                                                  {"13ForwardParamsEi", sizeof(ForwardParams)},
                                                  {"13ForwardParamsEiNS_4BiasE", sizeof(ForwardParams)}};
  for (const auto& [type, bytes] : sizes) {
    if (name.size() > std::strlen(type) && name.compare(name.size() - std::strlen(type), name.npos, type) == 0)
      return bytes;
  }
  return 0;
}

inline CUresult context_id_of(CUcontext, unsigned long long* id) {
  *id = context;
  return context != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

inline cudaError_t find(const char* name, void** entry, cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  if (std::strcmp(name, "cuTensorMapEncodeTiled") == 0)
    *entry = reinterpret_cast<void*>(encode_tiled);
  else if (std::strcmp(name, "cuCtxGetId") == 0)
    *entry = reinterpret_cast<void*>(context_id_of);
  else
    *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace runtime

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return runtime::find(name, entry, found);
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return runtime::find(name, entry, found);
}
#endif
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "(what went wrong)"; }
const char* cudaGetErrorName(cudaError_t) { return "(its name)"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? runtime::major
           : attribute == cudaDevAttrComputeCapabilityMinor ? runtime::minor
                                                            : 132;  // multiprocessors
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, runtime::mode);
  return cudaSuccess;
}
// A cubin is the id of its source; the library's handle points to it.
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  const std::lock_guard<std::mutex> lock(runtime::mutex);
  runtime::forbidden_in_captures();
  ++runtime::loaded;
  if (runtime::next_load != cudaSuccess) return runtime::next_load;
  const std::string id = static_cast<const char*>(code);
  *library = reinterpret_cast<cudaLibrary_t>(&(runtime::libraries[id] = id));
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  const std::lock_guard<std::mutex> lock(runtime::mutex);
  ++runtime::found;
  const std::string& id = *reinterpret_cast<const std::string*>(library);
  runtime::Kernel& known = runtime::kernels[id + " " + name];
  known = {id, name};
  *kernel = reinterpret_cast<cudaKernel_t>(&known);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  const std::lock_guard<std::mutex> lock(runtime::mutex);
  runtime::forbidden_in_captures();
  ++runtime::brought;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  const std::lock_guard<std::mutex> lock(runtime::mutex);
  ++runtime::opted_in;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const std::lock_guard<std::mutex> lock(runtime::mutex);
  runtime::Launch launch{};
  launch.kernel = static_cast<const runtime::Kernel*>(kernel);
  launch.ctas = config->gridDim.x, launch.threads = config->blockDim.x, launch.smem_bytes = config->dynamicSmemBytes;
  launch.cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      launch.dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
    if (attribute.id == cudaLaunchAttributeClusterDimension) launch.cluster = attribute.val.clusterDim.x;
  }
  const auto* const bytes = static_cast<const uint8_t*>(arguments[0]);
  launch.first.assign(bytes, bytes + runtime::argument_bytes(launch.kernel->name));
  const std::string& name = launch.kernel->name;
  if (name.find("13ForwardParamsEi") != name.npos) launch.second = *static_cast<const int*>(arguments[1]);
  if (name.find("10RaggedPackE") != name.npos)
    launch.ragged = *static_cast<const fp8cutlass::RaggedPack*>(arguments[1]);
  if (name.find("NS_4BiasE") != name.npos) launch.bias = *static_cast<const fp8cutlass::Bias*>(arguments[2]);
  runtime::launches.push_back(launch);
  return cudaSuccess;
}
}
