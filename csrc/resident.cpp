#include "resident.h"

#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "check.h"
#include "device.h"
#include "kernels.h"
#include "launch_resident.h"
#include "ragged.h"
#include "workspace.h"

namespace fp8cutlass {

namespace {

const ResidentEntry& entry_of(int64_t number, const View& q, const VariantEntry& variant) {
  require(number >= 0 && number < kResidentCount, "resident is ", number, ", outside of 0..", kResidentCount - 1);
  const ResidentEntry& entry = kResidents[number];
  const ScalarType type = entry.source == SourceType::fp16 ? ScalarType::Half : ScalarType::BFloat16;
  require(q.scalar_type() == type, entry.id, " takes q of another type");
  require(entry.head_dim == variant.head_dim, entry.id, " is for head_dim ", entry.head_dim, ", variant ", variant.id,
          " for ", variant.head_dim);
  const bool same = variant.tile_n == kKeyBlock && variant.key_block == kKeyBlock && !variant.ragged &&
                    (variant.mask == Mask::full || variant.mask == Mask::causal) && variant.split == 1 &&
                    variant.out == (entry.source == SourceType::fp16 ? OutType::fp16 : OutType::bf16);
  require(same, entry.id, " does not compute what variant ", variant.id, " does");
  return entry;
}

// Strides in bytes.
Strides source_strides(const View& x, const char* name) {
  require_aligned(x.data(), name);
  const Strides strides = row_strides(x, name, false);
  const int64_t bytes = x.element_size();
  return {bytes * strides.batch, bytes * strides.head, bytes * strides.row};
}

void set_inputs(ResidentParams& params, const View& q, const View& k, const View& v) {
  ForwardParams& p = params.p;
  const int64_t batch = q.size(0), heads = q.size(1), kv_heads = k.size(1), keys = k.size(2), columns = q.size(3);
  if (q.numel() == 0 || k.numel() == 0)
    fail("empty tensors take no launch: q has shape ", shape_text(q), ", k has shape ", shape_text(k));
  require(heads % kv_heads == 0, "q has ", heads, " heads, which is no multiple of k's ", kv_heads);
  require_shape(k, "k", {batch, kv_heads, keys, columns});
  require_shape(v, "v", {batch, kv_heads, keys, columns});
  require(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k and v must be of one type");
  require_same_device(k, "k", q);
  require_same_device(v, "v", q);
  p.q = static_cast<const uint8_t*>(q.data());
  p.k = static_cast<const uint8_t*>(k.data());
  p.v = static_cast<const uint8_t*>(v.data());
  const Strides of_q = source_strides(q, "q"), of_k = source_strides(k, "k"), of_v = source_strides(v, "v");
  p.q_stride_batch = of_q.batch, p.q_stride_head = of_q.head, p.q_stride_row = of_q.row;
  p.k_stride_batch = of_k.batch, p.k_stride_head = of_k.head, p.k_stride_row = of_k.row;
  params.v_stride_batch = of_v.batch, params.v_stride_head = of_v.head, params.v_stride_row = of_v.row;
  p.batch = to_int(batch, "the batch size");
  p.heads = to_int(heads, "the number of heads of q");
  p.kv_heads = to_int(kv_heads, "the number of heads of k");
  p.seqlen_q = to_int(q.size(2), "the sequence length of q");
  p.seqlen_k = to_int(keys, "the sequence length of k");
}

// Operands, how they are quantised, and scores. `Numbers`: AttendConstants or RaggedNumbers.
template <class Numbers>
ResidentParams params_of(const Numbers& n, const View& q, const View& k, const View& v,
                         const std::optional<Tensor>& sinks, const VariantEntry& variant) {
  ResidentParams params{};
  set_inputs(params, q, k, v);
  params.p.query = query_scaling(q, q.size(3), {n.score_amax, n.scale < 0, false}, variant);
  params.v_limit = fp8_limit(n.v_amax, "v_amax");
  params.v_limit_reciprocal = static_cast<float>(1.0 / n.v_amax);
  std::optional<View> of_heads;
  if (sinks) of_heads = *sinks;
  set_scores(params.p, variant, std::abs(n.scale), n.softcap, of_heads, q);
  return params;
}

void set_outputs(ForwardParams& p, const Tensor& out, const AttendTensors& tensors, const View& q) {
  const View o(out);
  p.o = o.data();
  const Strides strides = row_strides(o, "out", true);
  p.o_stride_batch = strides.batch, p.o_stride_head = strides.head, p.o_stride_row = strides.row;
  if (tensors.lse) {
    const View lse(*tensors.lse);
    require_shape(lse, "lse", {q.size(0), q.size(1), q.size(2)});
    p.lse = float_pointer(lse, "lse", q);
  }
  if (tensors.amax) {
    const View amax(*tensors.amax);
    require_shape(amax, "amax", {1});
    p.amax = float_pointer(amax, "amax", q);
  }
}

}  // namespace

Tensor attend_resident(const AttendConstants& c, const AttendTensors& tensors, const VariantEntry& variant) {
  const View q(tensors.q), k(tensors.k), v(tensors.v);
  require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 dimensions");
  require(q.is_cuda(), "q is not on a card");
  require(!tensors.k_mean && !c.hadamard && !tensors.out_descale && !tensors.mask.tiles && !tensors.mask.bias,
          "smoothing, rotation, FP8 output, masks in lists and biases have no kernel that keeps K and V");
  const ResidentEntry& entry = entry_of(c.resident, q, variant);
  require(k.size(2) <= entry.keys, "k has ", k.size(2), " keys, ", entry.id, " takes at most ", entry.keys);
  const auto is = [](int64_t granularity, Granularity shared_by) {
    return granularity == static_cast<int64_t>(shared_by);
  };
  require(is(c.q_granularity, Granularity::token) && is(c.k_granularity, Granularity::block) &&
              is(c.v_granularity, Granularity::block),
          entry.id, " has descales of rows of Q and of blocks of K and V");
  ResidentParams params = params_of(c, q, k, v, tensors.sinks, variant);
  ForwardParams& p = params.p;
  p.causal_offset = static_cast<int>(std::clamp<int64_t>(c.causal_offset, -int64_t{p.seqlen_q}, int64_t{p.seqlen_k}));
  const Tensor out = empty_result(q, c.seq_major, variant);
  set_outputs(p, out, tensors, q);
  const int device = static_cast<int>(q.device());
  const DeviceGuard guard(device);
  launch(entry, variant.mask == Mask::causal ? kResidentCausal : kResidentFull, params, device, current_stream(device));
  return out;
}

Tensor attend_resident_ragged(const RaggedNumbers& n, const RaggedTensors& tensors, const VariantEntry& variant,
                              int64_t resident) {
  const View given(tensors.q);
  require(given.dim() == 3 && View(tensors.k).dim() == 3 && View(tensors.v).dim() == 3,
          "q, k and v must have 3 dimensions");
  require(given.is_cuda(), "q is not on a card");
  require(n.softcap == 0, "a cap of scores has no kernel that keeps K and V");
  const std::initializer_list<int> by_head{View::kNew, 1, 0, 2};  // (1, heads, tokens, D)
  const View q = given.permuted(by_head), k = View(tensors.k).permuted(by_head), v = View(tensors.v).permuted(by_head);
  const ResidentEntry& entry = entry_of(resident, q, variant);
  ResidentParams params = params_of(n, q, k, v, tensors.sinks, variant);
  ForwardParams& p = params.p;
  std::optional<View> used_q, used_k;
  if (tensors.used_q) used_q = *tensors.used_q;
  if (tensors.used_k) used_k = *tensors.used_k;
  p.causal_offset = window_end(n.window_right);
  set_lengths(p.ragged, {tensors.cu_q, tensors.cu_k, used_q, used_k}, given);
  require(p.ragged.sequences > 0, "cu_seqlens_q has no sequence");
  p.ragged.key_tokens = p.seqlen_k;
  p.ragged.bottom_right = n.bottom_right;
  const int64_t tokens = given.size(0), heads = given.size(1), width = variant.head_dim;
  const Tensor out = empty<3>(given, type_of(variant.out), {tokens, heads, width}, {heads * width, width, 1});
  p.o = out.data_ptr();
  p.o_stride_row = heads * width, p.o_stride_head = width;
  if (tensors.lse) {
    const View lse(*tensors.lse);
    require_shape(lse, "lse", {heads, tokens});
    p.lse = float_pointer(lse, "lse", given);
  }
  const int device = static_cast<int>(given.device());
  const DeviceGuard guard(device);
  launch(entry, variant.mask == Mask::causal ? kResidentRaggedCausal : kResidentRaggedFull, params, device,
         current_stream(device));
  return out;
}

}  // namespace fp8cutlass
