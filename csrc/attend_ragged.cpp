#include "attend_ragged.h"

#include <cmath>

#include "arguments.h"
#include "check.h"
#include "device.h"
#include "fp8cutlass/walk/ragged_sizes.h"
#include "launch.h"
#include "launch_pack.h"
#include "pack_arguments.h"
#include "ragged.h"
#include "workspace.h"

namespace fp8cutlass {

Tensor attend_ragged(const RaggedNumbers& n, const RaggedTensors& tensors, const VariantEntry& variant) {
  const View q(tensors.q), k(tensors.k), v(tensors.v);
  require(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must have 3 dimensions");
  require(q.is_cuda(), "q is not on a card");
  const int64_t tokens = q.size(0), heads = q.size(1), key_tokens = k.size(0), kv_heads = k.size(1);
  const int64_t sequences = View(tensors.cu_q).numel() - 1, head_dim = variant.head_dim, block = variant.key_block;
  require(sequences > 0, "cu_seqlens_q has no sequence");
  const int64_t columns = ragged_columns(key_tokens, sequences, variant.key_block), blocks = columns / block;
  const int device = static_cast<int>(q.device());
  const std::initializer_list<int> by_head{View::kNew, 1, 0, 2};  // (1, heads, tokens, D)
  const View q_rows = q.permuted(by_head);
  const bool leave_q = n.leave_q && variant.quantises_q && can_be_mapped(q_rows, "q");

  constexpr int64_t kWord = sizeof(float);
  const int64_t q_bytes = leave_q ? 0 : heads * tokens * head_dim, kv_bytes = kv_heads * columns * head_dim;
  const int64_t q_words = leave_q ? 0 : heads * tokens, words = plan_words(tokens, sequences, variant);
  Layout layout;
  const int64_t q8 = layout.add(q_bytes), k8 = layout.add(kv_bytes), v8 = layout.add(kv_bytes);
  const int64_t q_scales = layout.add(q_words * kWord), k_scales = layout.add(kv_heads * blocks * kWord);
  const int64_t v_scales = layout.add(kv_heads * blocks * kWord), plan = layout.add(words * kWord);
  const Tensor workspace = tensors.workspace ? *tensors.workspace : empty<1>(q, byte_type(), {layout.total()}, {1});
  const View room(workspace);
  require(room.numel() >= layout.total(), "workspace has ", room.numel(), " bytes, ", layout.total(), " are needed");
  auto* const base = static_cast<uint8_t*>(dense_pointer(room, "workspace", q, ScalarType::Byte, "uint8"));
  require_aligned(base, "workspace");
  const auto bytes = [&](int64_t at, std::initializer_list<int64_t> sizes) {
    return View(base + at, ScalarType::Byte, device, sizes);
  };
  const auto floats = [&](int64_t at, std::initializer_list<int64_t> sizes) {
    return View(base + at, ScalarType::Float, device, sizes);
  };
  const View k_made = bytes(k8, {kv_heads, columns, head_dim}), v_made = bytes(v8, {kv_heads, head_dim, columns});
  const View k_descale = floats(k_scales, {1, kv_heads, blocks}), v_descale = floats(v_scales, {1, kv_heads, blocks});
  std::optional<View> q_given, q_made, q_descale;
  if (!leave_q) {
    q_given = q_rows, q_made = bytes(q8, {heads, tokens, head_dim});
    q_descale = floats(q_scales, {1, heads, tokens});
  }
  const std::initializer_list<int> of_batch{View::kNew, 0, 1, 2}, by_token{1, 0, 2};
  std::optional<View> q_batch;
  if (q_made) q_batch = q_made->permuted(of_batch);
  constexpr auto kToken = static_cast<int64_t>(Granularity::token), kBlock = static_cast<int64_t>(Granularity::block);
  const PackArguments packing{block,
                              q_given,
                              k.permuted(by_head),
                              v.permuted(by_head),
                              kToken,
                              kBlock,
                              kBlock,
                              n.score_amax,
                              n.v_amax,
                              n.scale < 0,
                              q_batch,
                              k_made.permuted(of_batch),
                              v_made.permuted(of_batch),
                              q_descale,
                              k_descale,
                              v_descale,
                              std::nullopt,
                              false,
                              std::nullopt,
                              columns};
  const PackEntry& pack = find_pack(packing);
  require(pack.ragged, "pack kernel ", pack.id, " takes no ragged batch");
  const PackParams pack_launch = pack_params(packing);

  const Tensor out = empty<3>(q, type_of(variant.out), {tokens, heads, head_dim}, {heads * head_dim, head_dim, 1});
  std::optional<View> lse, used_q, used_k, sinks;
  if (tensors.sinks) sinks = *tensors.sinks;
  if (tensors.lse) lse = *tensors.lse;
  if (tensors.used_q) used_q = *tensors.used_q;
  if (tensors.used_k) used_k = *tensors.used_k;
  std::optional<QuerySource> source;
  if (leave_q) source = QuerySource{n.score_amax, n.scale < 0, true};  // it is the pack kernel, launched in order
  ForwardParams params = ragged_params({leave_q ? q : q_made->permuted(by_token),
                                        k_made.permuted(by_token),
                                        v_made,
                                        q_descale,
                                        k_descale,
                                        v_descale,
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
                                        true,
                                        source,
                                        sinks,
                                        n.softcap},
                                       variant);
  params.ragged.key_tokens =
      to_int(key_tokens, "the tokens of k");  // there are no more, whatever the blocks have room for
  params.ragged.early = 1;
  const int64_t row_bytes = heads * head_dim * View(out).element_size();
  const RaggedPack batch{params.ragged, params.o, row_bytes, params.lse, params.seqlen_q, params.heads, 0};
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  launch_ragged(pack, pack_launch, batch, device, stream);
  launch(variant, params, device, stream);
  return out;
}

}  // namespace fp8cutlass
