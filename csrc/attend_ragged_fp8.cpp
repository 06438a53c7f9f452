#include "attend_ragged_fp8.h"

#include <cmath>

#include "check.h"
#include "copies.h"
#include "device.h"
#include "fp8cutlass/walk/ragged_sizes.h"
#include "launch.h"
#include "launch_pack.h"
#include "ragged.h"
#include "workspace.h"

namespace fp8cutlass {

namespace {

// That of Q, (1,) or (sequences, heads) as it is given, which becomes (1, heads, tokens); all but `out`.
Fp8Descale lowered_descale(const View& given, const View& q, int64_t sequences) {
  constexpr char kName[] = "q_descale";
  const int64_t tokens = q.size(0), heads = q.size(1);
  Fp8Descale d{};
  d.x = float_pointer(given, kName, q);
  if (given.dim() == 2) {
    require_shape(given, kName, {sequences, heads});
    d.stride_batch = heads, d.stride_head = 1;
  } else {
    require_shape(given, kName, {1});
  }
  d.heads = to_int(heads, kName), d.parts = d.given = to_int(tokens, kName);
  return d;
}

}  // namespace

Tensor attend_ragged_fp8(const RaggedFp8Numbers& n, const RaggedFp8Tensors& tensors, const VariantEntry& variant) {
  const View q_given(tensors.q), q = q_given.as_bytes("q");
  const View k = View(tensors.k).as_bytes("k"), v = View(tensors.v).as_bytes("v");
  require(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must have 3 dimensions");
  require(q.is_cuda(), "q is not on a card");
  require_same_device(k, "k", q), require_same_device(v, "v", q);
  const int64_t tokens = q.size(0), heads = q.size(1), columns = q.size(2);
  const int64_t key_tokens = k.size(0), kv_heads = k.size(1), head_dim = variant.head_dim;
  const int64_t sequences = View(tensors.cu_q).numel() - 1;
  require(sequences > 0, "cu_seqlens_q has no sequence");
  require(tokens > 0 && key_tokens > 0, "empty tensors take no launch: q has shape ", shape_text(q), ", k has shape ",
          shape_text(k));
  require(columns > 0 && columns % kAlignment == 0 && columns <= head_dim, "q has head_dim ", columns,
          ", which must be a multiple of ", kAlignment, ", at most the ", head_dim, " of variant ", variant.id);
  require_shape(k, "k", {key_tokens, kv_heads, columns});
  require_shape(v, "v", {key_tokens, kv_heads, columns});
  const PackEntry& pack = find_copies(variant);
  require(pack.ragged, "pack kernel ", pack.id, " takes no ragged batch");
  const int device = static_cast<int>(q.device());

  const std::initializer_list<int> by_head{View::kNew, 1, 0, 2};  // (1, heads, tokens, D)
  const View q_rows = q.permuted(by_head), k_rows = k.permuted(by_head), v_rows = v.permuted(by_head);
  const bool lowered = lowers(n.score_amax), leave_q = lowered && lowers_query(variant, q_rows);
  const bool copy_q = !leave_q && (lowered || columns < head_dim || n.scale < 0 || !can_be_mapped(q_rows, "q"));
  const bool copy_k = columns < head_dim || !can_be_mapped(k_rows, "k");
  const int64_t packed = ragged_columns(key_tokens, sequences, variant.key_block);
  const int64_t words = plan_words(tokens, sequences, variant);
  Layout layout;
  const int64_t q8 = layout.add(copy_q ? heads * tokens * head_dim : 0);
  const int64_t k8 = layout.add(copy_k ? kv_heads * key_tokens * head_dim : 0);
  const int64_t v8 = layout.add(kv_heads * packed * head_dim), plan = layout.add(words * sizeof(int));
  const int64_t q_scales = layout.add(lowered && !leave_q ? heads * tokens * sizeof(float) : 0);
  const Tensor workspace = empty<1>(q, byte_type(), {layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());

  Fp8PackParams packing{};
  packing.batch = 1, packing.head_dim = static_cast<int>(columns);
  packing.operand[kPackQ] = copied(q_rows, "q", copy_q ? base + q8 : nullptr, tokens, n.scale < 0);
  packing.operand[kPackK] = copied(k_rows, "k", copy_k ? base + k8 : nullptr, key_tokens, false);
  packing.operand[kPackV] = copied(v_rows, "v", base + v8, packed, false);
  packing.operand[kPackV].block = variant.key_block;
  View q_descale(tensors.q_descale);
  if (lowered && !leave_q) {
    packing.operand[kPackQ].lowers = 1;
    packing.descale[kPackQ] = lowered_descale(q_descale, q, sequences);
    packing.descale[kPackQ].out = reinterpret_cast<float*>(base + q_scales);
    q_descale = View(base + q_scales, ScalarType::Float, device, {1, heads, tokens});
  }
  const auto made = [&](int64_t at, int64_t of_heads, int64_t rows) {
    return View(base + at, ScalarType::Byte, device, {of_heads, rows, head_dim}).permuted({1, 0, 2});
  };
  const Tensor out = empty<3>(q, type_of(variant.out), {tokens, heads, head_dim}, {heads * head_dim, head_dim, 1});
  std::optional<View> lse, used_q, used_k, sinks;
  if (tensors.sinks) sinks = *tensors.sinks;
  if (tensors.lse) lse = *tensors.lse;
  if (tensors.used_q) used_q = *tensors.used_q;
  if (tensors.used_k) used_k = *tensors.used_k;
  ForwardParams params = ragged_params({copy_q ? made(q8, heads, tokens) : q,
                                        copy_k ? made(k8, kv_heads, key_tokens) : k,
                                        View(base + v8, ScalarType::Byte, device, {kv_heads, head_dim, packed}),
                                        q_descale,
                                        tensors.k_descale,
                                        tensors.v_descale,
                                        tensors.cu_q,
                                        tensors.cu_k,
                                        used_q,
                                        used_k,
                                        View(base + plan, ScalarType::Int, device, {words}),
                                        out,
                                        lse,
                                        std::abs(n.scale),
                                        n.window_left,
                                        n.window_right,
                                        n.bottom_right,
                                        false,
                                        std::nullopt,
                                        sinks,
                                        n.softcap},
                                       variant);
  params.ragged.early = 1;
  if (leave_q) lower_query(params.query, n.score_amax, n.scale, true);  // it is the pack kernel, launched in order
  const RaggedPack batch{
      params.ragged, params.o, heads * head_dim * View(out).element_size(), params.lse, params.seqlen_q,
      params.heads,  0};
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  launch_fp8_ragged(pack, packing, batch, device, stream);
  launch(variant, params, device, stream);
  return out;
}

}  // namespace fp8cutlass
