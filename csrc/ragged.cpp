#include "ragged.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "fp8cutlass/walk/ragged_sizes.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kPlanHead = 8;  // words before the first entry, of which the first is their number
constexpr int64_t kEntryWords = sizeof(RowTile) / sizeof(int);

// Row tiles that a plan has room for. Items of windows may be half as many rows (walk/item.h); the others need half.
int64_t most_entries(int64_t tokens, int64_t sequences, const VariantEntry& variant) {
  return std::max<int64_t>(1, most_row_tiles(tokens, sequences, variant.tile_m / 2));
}

const uint8_t* fp8_pointer(const View& tensor, const char* name, const View& q) {
  if (tensor.dim() != 3) fail(name, " must have 3 dimensions, got shape ", shape_text(tensor));
  require(tensor.scalar_type() == ScalarType::Byte, name, " must be a uint8 view of FP8 data");
  require_same_device(tensor, name, q);
  require_aligned(tensor.data(), name);
  return static_cast<const uint8_t*>(tensor.data());
}

// Strides of (tokens, heads, D) in elements.
void token_strides(const View& tensor, const char* name, int64_t& row, int64_t& head) {
  require(tensor.stride(2) == 1 || tensor.size(2) == 1, name, " must be contiguous in its last dimension");
  row = tensor.size(0) == 1 ? tensor.size(1) * tensor.size(2) : tensor.stride(0);
  head = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  const int64_t bytes = tensor.element_size();
  require(row > 0 && row * bytes % kAlignment == 0 && head * bytes % kAlignment == 0, name,
          " must have rows that begin on multiples of ", kAlignment, " bytes");
}

const int* int_pointer(const View& tensor, const char* name, const View& q, int64_t count) {
  require_shape(tensor, name, {count});
  return static_cast<const int*>(dense_pointer(tensor, name, q, ScalarType::Int, "int32"));
}

// Steps in the descales of an operand from sequence to sequence, head to head, and part to part: tokens or blocks.
struct Steps {
  int sequence, head, part;
};

Steps descale_steps(const View& descale, const char* name, int64_t sequences, int64_t heads, int64_t parts) {
  if (descale.dim() == 1 && descale.size(0) == 1) return {0, 0, 0};
  if (descale.dim() == 2) {
    require_shape(descale, name, {sequences, heads});
    return {to_int(heads, name), 1, 0};
  }
  require_shape(descale, name, {1, heads, parts});
  return {0, to_int(parts, name), 1};
}

// Q in FP8 with descales, or as it is for the kernel to quantise.
void set_query(ForwardParams& params, const RaggedArguments& a, const VariantEntry& variant, int64_t sequences) {
  const int64_t tokens = a.q.size(0), heads = a.q.size(1);
  if (a.source) {
    require(!a.q_descale, "q_descale is given, but q is no FP8");
    params.query = query_scaling(a.q, a.q.size(2), *a.source, variant);
    params.q = static_cast<const uint8_t*>(a.q.data());
  } else {
    params.q = fp8_pointer(a.q, "q", a.q);
    require_shape(a.q, "q", {tokens, heads, variant.head_dim});
    require(a.q_descale.has_value(), "q_descale is missing");
    params.q_descale = float_pointer(*a.q_descale, "q_descale", a.q);
    const Steps steps = descale_steps(*a.q_descale, "q_descale", sequences, heads, tokens);
    params.q_descale_head = steps.head, params.q_descale_row = steps.part;
    params.ragged.q_descale_sequence = steps.sequence;
  }
  token_strides(a.q, "q", params.q_stride_row, params.q_stride_head);
  params.q_stride_row *= a.q.element_size(), params.q_stride_head *= a.q.element_size();
}

}  // namespace

int window_end(int64_t keys) { return static_cast<int>(std::clamp<int64_t>(keys, -(1 << 30), 1 << 30)); }

void set_lengths(RaggedBatch& batch, const RaggedLengths& lengths, const View& q) {
  const int64_t sequences = lengths.cu_q.numel() - 1;
  batch.cu_q = int_pointer(lengths.cu_q, "cu_seqlens_q", q, sequences + 1);
  batch.cu_k = int_pointer(lengths.cu_k, "cu_seqlens_k", q, sequences + 1);
  if (lengths.used_q) batch.used_q = int_pointer(*lengths.used_q, "seqused_q", q, sequences);
  if (lengths.used_k) batch.used_k = int_pointer(*lengths.used_k, "seqused_k", q, sequences);
  batch.sequences = to_int(sequences, "the number of sequences");
}

int64_t plan_words(int64_t tokens, int64_t sequences, const VariantEntry& variant) {
  return kPlanHead + kEntryWords * most_entries(tokens, sequences, variant);
}

ForwardParams ragged_params(const RaggedArguments& a, const VariantEntry& variant) {
  require(variant.ragged, "variant ", variant.id, " takes no ragged batch");
  ForwardParams params{};
  params.k = fp8_pointer(a.k, "k", a.q);
  params.v = fp8_pointer(a.v, "v", a.q);
  const int64_t tokens = a.q.size(0), heads = a.q.size(1), head_dim = variant.head_dim;
  const int64_t key_rows = a.k.size(0), kv_heads = a.k.size(1), sequences = a.lengths.cu_q.numel() - 1;
  if (tokens == 0 || heads == 0 || key_rows == 0 || sequences < 1)
    fail("empty tensors take no launch: q has shape ", shape_text(a.q), ", k has shape ", shape_text(a.k));
  require(kv_heads > 0 && heads % kv_heads == 0, "q has ", heads, " heads, which is no multiple of k's ", kv_heads);
  require_shape(a.k, "k", {key_rows, kv_heads, head_dim});
  require(a.v.is_contiguous(), "v (packed) must be contiguous");
  const int64_t key_block = variant.key_block, columns = a.v.size(2), blocks = columns / key_block;
  require_shape(a.v, "v (packed)", {kv_heads, head_dim, blocks * key_block});
  // Tokens of K as the lengths count them: where K lies in blocks, what is left when each sequence has wasted one.
  const int64_t key_tokens = a.keys_in_blocks ? (blocks - sequences) * key_block : key_rows;
  require(blocks >= ragged_blocks(key_tokens, sequences, static_cast<int>(key_block)), "v (packed) has ", blocks,
          " blocks, ", sequences, " sequences of ", key_tokens, " keys take more");
  require(!a.keys_in_blocks || key_rows == columns, "k in blocks has ", key_rows, " rows, v has ", columns);
  params.batch = 1;
  params.heads = to_int(heads, "the number of heads of q"), params.kv_heads = to_int(kv_heads, "that of k");
  params.seqlen_q = to_int(tokens, "the tokens of q"), params.seqlen_k = to_int(key_rows, "the tokens of k");
  params.seqlen_k_padded = to_int(columns, "the columns of v");
  token_strides(a.k, "k", params.k_stride_row, params.k_stride_head);

  set_query(params, a, variant, sequences);
  params.k_descale = float_pointer(a.k_descale, "k_descale", a.q);
  params.v_descale = float_pointer(a.v_descale, "v_descale", a.q);
  const Steps k = descale_steps(a.k_descale, "k_descale", sequences, kv_heads, blocks);
  const Steps v = descale_steps(a.v_descale, "v_descale", sequences, kv_heads, blocks);
  params.k_descale_head = k.head, params.k_descale_block = k.part;
  params.v_descale_head = v.head, params.v_descale_block = v.part;

  const ScalarType type = variant.out == OutType::bf16 ? ScalarType::BFloat16 : ScalarType::Half;
  require(variant.out != OutType::e4m3 && a.out.scalar_type() == type, "out must be ",
          type == ScalarType::Half ? "float16" : "bfloat16", " for variant ", variant.id);
  require_shape(a.out, "out", {tokens, heads, head_dim});
  require_same_device(a.out, "out", a.q);
  params.o = a.out.data();
  require_aligned(params.o, "out");
  token_strides(a.out, "out", params.o_stride_row, params.o_stride_head);
  if (a.lse) {
    require_shape(*a.lse, "lse", {heads, tokens});
    params.lse = float_pointer(*a.lse, "lse", a.q);
  }

  set_scores(params, variant, a.scale, a.softcap, a.sinks, a.q);
  params.causal_offset = window_end(a.window_right), params.window_offset = window_end(-a.window_left);

  RaggedBatch& batch = params.ragged;
  set_lengths(batch, a.lengths, a.q);
  batch.key_tokens = to_int(key_tokens, "the tokens of k");
  batch.keys_in_blocks = a.keys_in_blocks;
  batch.bottom_right = a.bottom_right;
  batch.k_descale_sequence = k.sequence, batch.v_descale_sequence = v.sequence;
  require_shape(a.plan, "plan", {plan_words(tokens, sequences, variant)});
  int* const words = static_cast<int*>(dense_pointer(a.plan, "plan", a.q, ScalarType::Int, "int32"));
  require_aligned(words, "plan");
  batch.count = words;
  batch.tiles = reinterpret_cast<RowTile*>(words + kPlanHead);
  batch.most = to_int(most_entries(tokens, sequences, variant), "the row tiles");
  return params;
}

}  // namespace fp8cutlass
