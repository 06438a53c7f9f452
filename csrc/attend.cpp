#include "attend.h"

#include <mutex>

#include "arguments.h"
#include "check.h"
#include "device.h"
#include "handover.h"
#include "launch.h"
#include "launch_pack.h"
#include "numbers.h"
#include "pack_arguments.h"
#include "resident.h"
#include "workspace.h"

namespace fp8cutlass {

AttendConstants attend_constants(const Tensor& numbers) {
  constexpr int64_t kNumbers = 0
#define X(type, name, meaning) +1
#include "call.def"
#undef X
      ;
  const double* x = numbers_of(numbers, kNumbers);
  AttendConstants constants{};
#define X(type, name, meaning) constants.name = number_as<type>(*x++, #name);
#include "call.def"
#undef X
  return constants;
}

Tensor attend(const AttendConstants& c, const AttendTensors& tensors, const VariantEntry& variant) {
  if (c.resident >= 0) return attend_resident(c, tensors, variant);
  const View q(tensors.q), k(tensors.k), v(tensors.v);
  require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must have 4 dimensions");
  require(q.is_cuda(), "q is not on a card");
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2);
  const int64_t kv_heads = k.size(1), keys = k.size(2), padded = padded_keys(keys);
  const int64_t head_dim = variant.head_dim, key_block = variant.key_block;
  const int device = static_cast<int>(q.device());
  // Descales of single keys are read in whole tiles.
  const auto tokens_of = [&](int64_t granularity) {
    return granularity == static_cast<int64_t>(Granularity::token) ? padded : keys;
  };
  const auto count = [&](int64_t granularity, int64_t all_heads, int64_t tokens) {
    return descale_count(static_cast<Granularity>(granularity), all_heads, tokens, key_block, head_dim);
  };
  const bool leave_q = c.leave_q && can_be_mapped(q, "q");
  const int64_t q_count = leave_q ? 0 : count(c.q_granularity, batch * heads, rows);
  const int64_t k_count = count(c.k_granularity, batch * kv_heads, tokens_of(c.k_granularity));
  const int64_t v_count = count(c.v_granularity, batch * kv_heads, tokens_of(c.v_granularity));
  const auto maxima_of = [](int64_t granularity, int64_t number) {
    return beyond_blocks(static_cast<Granularity>(granularity)) ? number : 0;
  };
  const int64_t groups =
      maxima_of(c.q_granularity, q_count) + maxima_of(c.k_granularity, k_count) + maxima_of(c.v_granularity, v_count);
  constexpr int64_t kFloat = sizeof(float);
  Layout layout;
  const int64_t q8 = layout.add(leave_q ? 0 : batch * heads * rows * head_dim),
                k8 = layout.add(batch * kv_heads * keys * head_dim);
  const int64_t v8 = layout.add(batch * kv_heads * head_dim * padded);
  const int64_t q_descale = layout.add(q_count * kFloat), k_descale = layout.add(k_count * kFloat);
  const int64_t v_descale = layout.add(v_count * kFloat), maxima = layout.add(groups * kFloat);
  const Tensor workspace = empty<1>(q, byte_type(), {layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());
  const auto bytes = [&](int64_t at, std::initializer_list<int64_t> sizes) {
    return View(base + at, ScalarType::Byte, device, sizes);
  };
  const auto floats = [&](int64_t at, int64_t number) { return View(base + at, ScalarType::Float, device, {number}); };
  std::optional<View> groups_view, packed_q, q8_view, q_descale_view;
  if (groups > 0) groups_view = floats(maxima, groups);
  if (!leave_q) {
    packed_q = q;
    q8_view = bytes(q8, {batch, heads, rows, head_dim});
    q_descale_view = floats(q_descale, q_count);
  }

  const PackArguments packing{key_block,
                              packed_q,
                              k,
                              v,
                              c.q_granularity,
                              c.k_granularity,
                              c.v_granularity,
                              c.score_amax,
                              c.v_amax,
                              c.scale < 0,
                              q8_view,
                              bytes(k8, {batch, kv_heads, keys, head_dim}),
                              bytes(v8, {batch, kv_heads, head_dim, padded}),
                              q_descale_view,
                              floats(k_descale, k_count),
                              floats(v_descale, v_count),
                              groups_view,
                              c.hadamard,
                              tensors.k_mean,
                              std::nullopt};
  const PackEntry& pack = find_pack(packing);
  PackParams pack_launch = pack_params(packing);
  const Tensor out = empty_result(q, c.seq_major, variant);
  std::optional<QuerySource> source;
  if (leave_q) source = QuerySource{c.score_amax, c.scale < 0, true};  // it is the pack kernel, launched in order
  ForwardParams params =
      forward_params({leave_q ? q : *q8_view, *packing.k8, *packing.v8, q_descale_view, *packing.k_descale,
                      *packing.v_descale, tensors.out_descale, out, tensors.lse, tensors.amax, std::abs(c.scale),
                      c.causal_offset, c.window_offset, source, c.merge_lse, tensors.sinks, c.softcap},
                     variant);
  const MaskParams mask = mask_params(tensors.mask, params, variant, device);
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (groups > 0) check_launch(cudaMemsetAsync(base + maxima, 0, groups * kFloat, stream), pack.id, device);
  std::unique_lock<std::mutex> handed_over;
  if (c.hand_over && leave_q && pack.delivers() && can_be_mapped(k, "k") && can_be_mapped(v, "v"))
    handed_over = hand_over(pack_launch, params, static_cast<int>(key_block), device, stream);
  launch(pack, pack_launch, device, stream);
  try {
    launch(variant, params, device, stream, mask);
  } catch (...) {
    if (handed_over) take_back(params, stream);
    throw;
  }
  return out;
}

}  // namespace fp8cutlass
