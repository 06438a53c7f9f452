#include "attend_fp8.h"

#include <cmath>

#include "arguments.h"
#include "check.h"
#include "copies.h"
#include "device.h"
#include "launch.h"
#include "launch_pack.h"
#include "pack_arguments.h"
#include "workspace.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kFloat = sizeof(float);

// An operand's descales as they are given, and as the kernel reads them.
struct Descales {
  std::optional<View> given;
  Fp8Descale spread;  // with a count where `given` cannot be read as it lies; all but `out`
  int64_t count;      // that the kernel reads
};

// Of an operand (batch, heads, tokens, columns). `tokens` are read of it where they have descales.
Descales descales_of(const std::optional<Tensor>& tensor, double number, const char* name, int64_t position,
                     const View& x, int64_t tokens, const VariantEntry& variant) {
  constexpr auto kChannel = static_cast<int64_t>(Granularity::channel);
  require(position >= 0 && position <= kChannel, name, ": what shares it is ", position, ", outside of 0..", kChannel);
  const auto shared_by = static_cast<Granularity>(position);
  const bool by_token = shared_by == Granularity::token, by_channel = shared_by == Granularity::channel;
  const bool whole = shared_by == Granularity::tensor;
  const int64_t batch = whole ? 1 : x.size(0), heads = whole ? 1 : x.size(1);
  const int64_t parts = whole ? 1 : descale_count(shared_by, 1, tokens, variant.key_block, variant.head_dim);
  int64_t given = by_token ? x.size(2) : by_channel ? x.size(3) : parts;
  Descales d{};
  Fp8Descale& spread = d.spread;
  d.count = batch * heads * parts;
  spread.value = static_cast<float>(number);
  spread.heads = to_int(heads, name), spread.parts = to_int(parts, name), spread.count = to_int(d.count, name);
  if (tensor) {
    const View view(*tensor);
    d.given = view;
    require(view.scalar_type() == ScalarType::Float, name, " must be float32");
    require_same_device(view, name, x);
    spread.x = static_cast<const float*>(view.data());
    const int64_t dims = view.dim();
    const bool finer = !whole && shared_by != Granularity::head;
    const bool of_each = finer && dims == 3 && view.size(0) == batch && view.size(1) == heads;
    if (dims == 0 || (dims == 1 && view.size(0) == 1)) {
      // one for all
    } else if (!whole && dims == 1 && view.size(0) == heads) {
      spread.stride_head = view.stride(0);
    } else if (!whole && dims == 2 && view.size(0) == batch && view.size(1) == heads) {
      spread.stride_batch = view.stride(0), spread.stride_head = view.stride(1);
    } else if (of_each && (view.size(2) == given || (by_channel && view.size(2) <= given))) {
      given = view.size(2);  // columns that were added behind those of the caller have none
      spread.stride_batch = view.stride(0), spread.stride_head = view.stride(1), spread.stride_part = view.stride(2);
    } else {
      fail(name, " has shape ", shape_text(view), ", expected one of those that ", batch, " x ", heads, " x ", given,
           " descales can be spread from");
    }
    // Descales of K's tokens are copied 16 bytes at a time.
    const bool fits = !by_token || reinterpret_cast<uintptr_t>(spread.x) % kAlignment == 0;
    if (view.numel() == d.count && view.is_contiguous() && fits) spread.count = 0;
  } else {
    require(number > 0, name, " is missing");
  }
  spread.given = to_int(given, name);
  return d;
}

}  // namespace

Tensor attend_fp8(const AttendConstants& c, const Fp8Tensors& tensors, const VariantEntry& variant) {
  const View q_given(tensors.q), q = q_given.as_bytes("q"), k = View(tensors.k).as_bytes("k"),
                                 v = View(tensors.v).as_bytes("v");
  require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 dimensions");
  require(q.is_cuda(), "q is not on a card");
  require_same_device(k, "k", q), require_same_device(v, "v", q);
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2), columns = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), padded = padded_keys(keys), head_dim = variant.head_dim;
  require(columns > 0 && columns % kAlignment == 0 && columns <= head_dim, "q has head_dim ", columns,
          ", which must be a multiple of ", kAlignment, ", at most the ", head_dim, " of variant ", variant.id);
  require_shape(k, "k", {batch, kv_heads, keys, columns});
  require_shape(v, "v", {batch, kv_heads, keys, columns});
  const int device = static_cast<int>(q.device());
  const PackEntry& pack = find_copies(variant);

  // Kernels with f16 scores read a descale of each row of Q, which is lowered for them.
  const bool e4m3 = q_given.scalar_type() == ScalarType::Float8_e4m3fn;
  const bool finest = c.q_granularity == static_cast<int64_t>(Granularity::token) &&
                      c.k_granularity == static_cast<int64_t>(Granularity::block);
  const bool lowered = e4m3 && finest && lowers(c.score_amax), leave_q = lowered && lowers_query(variant, q);
  const bool copy_q = !leave_q && (lowered || columns < head_dim || c.scale < 0 || !can_be_mapped(q, "q"));
  const bool copy_k = columns < head_dim || !can_be_mapped(k, "k");
  const bool by_token = c.k_granularity == static_cast<int64_t>(Granularity::token);
  Descales q_scales = descales_of(tensors.q_descale, c.q_descale, "q_descale", c.q_granularity, q, rows, variant);
  Descales k_scales =
      descales_of(tensors.k_descale, c.k_descale, "k_descale", c.k_granularity, k, by_token ? padded : keys, variant);
  Descales v_scales = descales_of(tensors.v_descale, c.v_descale, "v_descale", c.v_granularity, v, keys, variant);
  Layout layout;
  if (lowered && !leave_q) q_scales.spread.count = to_int(q_scales.count, "q_descale");
  const int64_t q8 = layout.add(copy_q ? batch * heads * rows * head_dim : 0);
  const int64_t k8 = layout.add(copy_k ? batch * kv_heads * keys * head_dim : 0);
  const int64_t v8 = layout.add(batch * kv_heads * head_dim * padded);
  const int64_t q_at = layout.add(q_scales.spread.count * kFloat), k_at = layout.add(k_scales.spread.count * kFloat);
  const int64_t v_at = layout.add(v_scales.spread.count * kFloat);
  const Tensor workspace = empty<1>(q, byte_type(), {layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());

  Fp8PackParams packing{};
  packing.batch = to_int(batch, "the batch size");
  packing.head_dim = static_cast<int>(columns);
  packing.operand[kPackQ] = copied(q, "q", copy_q ? base + q8 : nullptr, rows, c.scale < 0);
  packing.operand[kPackK] = copied(k, "k", copy_k ? base + k8 : nullptr, keys, false);
  packing.operand[kPackV] = copied(v, "v", base + v8, padded, false);
  const auto spread = [&](PackOrder which, Descales& d, int64_t at) {
    if (d.spread.count == 0) return *d.given;
    d.spread.out = reinterpret_cast<float*>(base + at);
    packing.descale[which] = d.spread;
    return View(d.spread.out, ScalarType::Float, device, {d.count});
  };
  const View q_descale = spread(kPackQ, q_scales, q_at), k_descale = spread(kPackK, k_scales, k_at);
  const View v_descale = spread(kPackV, v_scales, v_at);
  if (lowered && !leave_q) {
    packing.operand[kPackQ].lowers = 1;
    packing.descale[kPackQ].count = 0;  // written with its rows
  }
  const auto bytes = [&](int64_t at, int64_t of_heads, int64_t third, int64_t fourth) {
    return View(base + at, ScalarType::Byte, device, {batch, of_heads, third, fourth});
  };
  const Tensor out = empty_result(q, c.seq_major, variant);
  ForwardParams params =
      forward_params({copy_q ? bytes(q8, heads, rows, head_dim) : q, copy_k ? bytes(k8, kv_heads, keys, head_dim) : k,
                      bytes(v8, kv_heads, head_dim, padded), q_descale, k_descale, v_descale, tensors.out_descale, out,
                      tensors.lse, tensors.amax, std::abs(c.scale), c.causal_offset, c.window_offset, std::nullopt,
                      c.merge_lse, tensors.sinks, c.softcap},
                     variant);
  if (leave_q) lower_query(params.query, c.score_amax, c.scale, q_scales.spread.count == 0);
  const MaskParams mask = mask_params(tensors.mask, params, variant, device);
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  launch_fp8(pack, packing, device, stream);
  launch(variant, params, device, stream, mask);
  return out;
}

Tensor attend_packed(const AttendConstants& c, const PackedTensors& tensors, const VariantEntry& variant) {
  const View q(tensors.q), k(tensors.k);
  require(q.dim() == 4 && k.dim() == 4, "q and k must have 4 dimensions");
  require(q.is_cuda(), "q is not on a card");
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2), head_dim = variant.head_dim;
  const int device = static_cast<int>(q.device());
  const auto shared_by = static_cast<Granularity>(c.q_granularity);
  const int64_t count = descale_count(shared_by, batch * heads, rows, variant.key_block, head_dim);
  const int64_t groups = beyond_blocks(shared_by) ? count : 0;
  Layout layout;
  const int64_t q8 = layout.add(batch * heads * rows * head_dim), scales = layout.add(count * kFloat);
  const int64_t maxima = layout.add(groups * kFloat);
  const Tensor workspace = empty<1>(q, byte_type(), {layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());
  const View q_made(base + q8, ScalarType::Byte, device, {batch, heads, rows, head_dim});
  const View q_descale(base + scales, ScalarType::Float, device, {count});
  std::optional<View> groups_view;
  if (groups > 0) groups_view = View(base + maxima, ScalarType::Float, device, {groups});
  PackArguments packing{};
  packing.key_block = variant.key_block;
  packing.q = q, packing.q8 = q_made, packing.q_descale = q_descale, packing.amax = groups_view;
  packing.q_granularity = c.q_granularity, packing.k_granularity = c.k_granularity;
  packing.score_amax = c.score_amax;
  packing.negate_q = c.scale < 0;
  packing.hadamard = c.hadamard;
  const PackEntry& pack = find_pack(packing);
  const PackParams pack_launch = pack_params(packing);
  const Tensor out = tensors.out ? *tensors.out : empty_result(q, c.seq_major, variant);
  ForwardParams params =
      forward_params({q_made, k, tensors.v, q_descale, tensors.k_descale, tensors.v_descale, tensors.out_descale, out,
                      tensors.lse, tensors.amax, std::abs(c.scale), c.causal_offset, c.window_offset, std::nullopt,
                      c.merge_lse, tensors.sinks, c.softcap},
                     variant);
  const MaskParams mask = mask_params(tensors.mask, params, variant, device);
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (groups > 0) check_launch(cudaMemsetAsync(base + maxima, 0, groups * kFloat, stream), pack.id, device);
  launch(pack, pack_launch, device, stream);
  launch(variant, params, device, stream, mask);
  return out;
}

}  // namespace fp8cutlass
