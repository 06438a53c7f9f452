#include "workspace.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>

#include "check.h"
#include "device.h"

namespace fp8cutlass {

// The C function underneath costs the host half of what a call through the dispatcher does.
template <size_t kDim>
Tensor empty(const View& q, int32_t type, const std::array<int64_t, kDim>& sizes,
             const std::array<int64_t, kDim>& strides) {
  const auto device = static_cast<int32_t>(q.device());
  AtenTensorHandle handle = nullptr;
  const int32_t status = aoti_torch_empty_strided(kDim, sizes.data(), strides.data(), type,
                                                  aoti_torch_device_type_cuda(), device, &handle);
  if (status != 0) {
    // An error of an earlier launch may come to light here, too.
    const cudaError_t error = cudaPeekAtLastError();
    const bool memory = error == cudaSuccess || error == cudaErrorMemoryAllocation;
    fail("an allocation on CUDA device ", device, " failed: ", memory ? "out of memory" : cudaGetErrorString(error));
  }
  return Tensor(handle);
}

template Tensor empty(const View&, int32_t, const std::array<int64_t, 1>&, const std::array<int64_t, 1>&);
template Tensor empty(const View&, int32_t, const std::array<int64_t, 3>&, const std::array<int64_t, 3>&);
template Tensor empty(const View&, int32_t, const std::array<int64_t, 4>&, const std::array<int64_t, 4>&);

Tensor empty_result(const View& q, bool seq_major, const VariantEntry& variant) {
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2), head_dim = variant.head_dim;
  const int64_t head = seq_major ? head_dim : rows * head_dim, row = seq_major ? heads * head_dim : head_dim;
  return empty<4>(q, type_of(variant.out), {batch, heads, rows, head_dim}, {heads * rows * head_dim, head, row, 1});
}

int32_t type_of(OutType out) {
  return out == OutType::bf16   ? aoti_torch_dtype_bfloat16()
         : out == OutType::fp16 ? aoti_torch_dtype_float16()
                                : aoti_torch_dtype_float8_e4m3fn();
}

int32_t byte_type() { return aoti_torch_dtype_uint8(); }

bool can_be_mapped(const View& x, const char* name) {
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  const Strides strides = row_strides(x, name, false);
  const int64_t most = std::max({strides.batch, strides.head, strides.row});
  return (strides.row != 0 || x.size(2) == 1) && most < kMostBytes / x.element_size();
}

}  // namespace fp8cutlass
