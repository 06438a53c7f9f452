#include "attend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cmath>

#include "arguments.h"
#include "check.h"
#include "device.h"
#include "launch.h"
#include "pack_arguments.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kPieceAlignment = 256;  // of what lies in the workspace; tensor maps and bulk copies need 16

// Memory on q's card. The C function underneath costs the host half of what a call through the dispatcher does.
template <size_t kDim>
Tensor empty(const Tensor& q, int32_t type, const std::array<int64_t, kDim>& sizes,
             const std::array<int64_t, kDim>& strides) {
  AtenTensorHandle handle = nullptr;
  const int32_t status = aoti_torch_empty_strided(kDim, sizes.data(), strides.data(), type,
                                                  aoti_torch_device_type_cuda(), q.get_device_index(), &handle);
  if (status != 0) {
    // An error of an earlier launch may come to light here, too.
    const cudaError_t error = cudaPeekAtLastError();
    const bool memory = error == cudaSuccess || error == cudaErrorMemoryAllocation;
    fail("an allocation on CUDA device ", q.get_device_index(),
         " failed: ", memory ? "out of memory" : cudaGetErrorString(error));
  }
  return Tensor(handle);
}

int32_t type_of(OutType out) {
  return out == OutType::bf16   ? aoti_torch_dtype_bfloat16()
         : out == OutType::fp16 ? aoti_torch_dtype_float16()
                                : aoti_torch_dtype_float8_e4m3fn();
}

Tensor empty_result(const AttendArguments& a, const VariantEntry& variant) {
  const int64_t batch = a.q.size(0), heads = a.q.size(1), rows = a.q.size(2), head_dim = variant.head_dim;
  const int64_t head = a.seq_major ? head_dim : rows * head_dim, row = a.seq_major ? heads * head_dim : head_dim;
  return empty<4>(a.q, type_of(variant.out), {batch, heads, rows, head_dim}, {heads * rows * head_dim, head, row, 1});
}

// What lies in one allocation, piece by piece.
class Layout {
 public:
  // Returns where a piece of so many bytes begins.
  int64_t add(int64_t bytes) {
    const int64_t begin = total_;
    total_ += (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    return begin;
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

}  // namespace

Tensor attend(const AttendArguments& a, const VariantEntry& variant) {
  require(a.q.dim() == 4 && a.k.dim() == 4 && a.v.dim() == 4, "q, k and v must have 4 dimensions");
  require(a.q.is_cuda(), "q is not on a card");
  const int64_t batch = a.q.size(0), heads = a.q.size(1), rows = a.q.size(2);
  const int64_t kv_heads = a.k.size(1), keys = a.k.size(2), padded = padded_keys(keys);
  const int64_t head_dim = variant.head_dim, key_block = variant.key_block;
  const int device = a.q.get_device_index();
  // K's descales of tokens are read in whole tiles.
  const bool by_token = a.k_granularity == static_cast<int64_t>(Granularity::token);
  const auto count = [&](int64_t granularity, int64_t all_heads, int64_t tokens) {
    return descale_count(static_cast<Granularity>(granularity), all_heads, tokens, key_block, head_dim);
  };
  const int64_t q_count = count(a.q_granularity, batch * heads, rows);
  const int64_t k_count = count(a.k_granularity, batch * kv_heads, by_token ? padded : keys);
  const int64_t v_count = count(a.v_granularity, batch * kv_heads, keys);
  const auto maxima_of = [](int64_t granularity, int64_t number) {
    return beyond_blocks(static_cast<Granularity>(granularity)) ? number : 0;
  };
  const int64_t groups =
      maxima_of(a.q_granularity, q_count) + maxima_of(a.k_granularity, k_count) + maxima_of(a.v_granularity, v_count);
  constexpr int64_t kFloat = sizeof(float);
  Layout layout;
  const int64_t q8 = layout.add(batch * heads * rows * head_dim), k8 = layout.add(batch * kv_heads * keys * head_dim);
  const int64_t v8 = layout.add(batch * kv_heads * head_dim * padded);
  const int64_t q_descale = layout.add(q_count * kFloat), k_descale = layout.add(k_count * kFloat);
  const int64_t v_descale = layout.add(v_count * kFloat), maxima = layout.add(groups * kFloat);
  const Tensor workspace = empty<1>(a.q, aoti_torch_dtype_uint8(), {layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());
  const auto bytes = [&](int64_t at, std::initializer_list<int64_t> sizes) {
    return View(base + at, ScalarType::Byte, device, sizes);
  };
  const auto floats = [&](int64_t at, int64_t number) { return View(base + at, ScalarType::Float, device, {number}); };
  std::optional<View> groups_view;
  if (groups > 0) groups_view = floats(maxima, groups);

  const PackArguments packing{key_block,
                              a.q,
                              a.k,
                              a.v,
                              a.q_granularity,
                              a.k_granularity,
                              a.v_granularity,
                              a.score_amax,
                              a.v_amax,
                              a.scale < 0,
                              bytes(q8, {batch, heads, rows, head_dim}),
                              bytes(k8, {batch, kv_heads, keys, head_dim}),
                              bytes(v8, {batch, kv_heads, head_dim, padded}),
                              floats(q_descale, q_count),
                              floats(k_descale, k_count),
                              floats(v_descale, v_count),
                              groups_view,
                              a.hadamard,
                              a.k_mean};
  const PackEntry& pack = find_pack(packing);
  const PackParams pack_launch = pack_params(packing);
  const Tensor out = empty_result(a, variant);
  ForwardParams params =
      forward_params({*packing.q8, *packing.k8, *packing.v8, *packing.q_descale, *packing.k_descale, *packing.v_descale,
                      a.out_descale, out, a.lse, a.amax, std::abs(a.scale), a.causal_offset},
                     variant);
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (groups > 0) check_launch(cudaMemsetAsync(base + maxima, 0, groups * kFloat, stream), pack.id, device);
  check_launch(pack.launch(pack_launch, stream), pack.id, device);
  launch(variant, params, device, stream);
  return out;
}

}  // namespace fp8cutlass
