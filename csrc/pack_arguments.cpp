#include "pack_arguments.h"

#include <cmath>

#include "check.h"

namespace fp8cutlass {

namespace {

Granularity granularity_of(int64_t position, const char* name, bool is_v) {
  const int64_t rows = static_cast<int64_t>(Granularity::token), columns = static_cast<int64_t>(Granularity::channel);
  require(position >= 0 && position <= columns, name, " is ", position, ", outside of 0..", columns);
  require(position != (is_v ? rows : columns), name, ": ",
          is_v ? "V cannot be scaled by token" : "only V has channels");
  return static_cast<Granularity>(position);
}

float limit_of(double amax, const char* name) {
  require(amax >= 1 && amax <= 448, name, " must lie in [1, 448], got ", amax);
  return static_cast<float>(amax);
}

// Descales of an operand with these sizes.
int64_t descales_of(const PackOperand& o, int64_t batch, int64_t key_block, int64_t head_dim) {
  const int tokens = o.granularity == Granularity::token ? o.rows : o.tokens;
  return descale_count(o.granularity, batch * o.heads, tokens, key_block, head_dim);
}

struct Names {
  const char *x, *out, *descale, *granularity, *amax;
};

PackOperand operand_of(const PackArguments& a, PackOrder which, const Names& name, const View& x, const View& out,
                       const View& descale, int64_t granularity, double amax) {
  const bool packed = which == kPackV;
  const int64_t batch = a.q.size(0), head_dim = a.q8.size(3);
  if (x.dim() != 4) fail(name.x, " must have 4 dimensions, got shape ", shape_text(x));
  require(x.scalar_type() == a.q.scalar_type(), name.x, " is not of the type of q");
  require_same_device(x, name.x, a.q);
  PackOperand o{};
  o.x = x.data();
  require_aligned(o.x, name.x);
  const Strides from = row_strides(x, name.x, false);
  o.stride_batch = from.batch, o.stride_head = from.head, o.stride_row = from.row;
  o.heads = to_int(x.size(1), name.x), o.tokens = to_int(x.size(2), name.x);
  o.granularity = granularity_of(granularity, name.granularity, packed);
  o.rows = o.tokens;
  // K's descales of tokens are read in whole tiles.
  const bool whole_tiles = packed || (o.granularity == Granularity::token && which == kPackK);
  if (whole_tiles) o.rows = to_int(padded_keys(o.tokens), name.x);
  o.limit = limit_of(amax, name.amax);
  o.limit_reciprocal = static_cast<float>(1.0 / amax);

  require(out.scalar_type() == ScalarType::Byte, name.out, " must be a uint8 view of e4m3 data");
  require_same_device(out, name.out, a.q);
  if (packed) {
    require_shape(out, name.out, {batch, o.heads, head_dim, o.rows});
    require(out.is_contiguous(), name.out, " must be contiguous");
  } else {
    require_shape(out, name.out, {batch, o.heads, o.tokens, head_dim});
    const Strides to = row_strides(out, name.out, true);
    o.out_stride_batch = to.batch, o.out_stride_head = to.head, o.out_stride_row = to.row;
  }
  o.out = static_cast<uint8_t*>(out.data());
  require_aligned(o.out, name.out);

  const int64_t expected = descales_of(o, batch, a.key_block, head_dim);
  require(descale.numel() == expected, name.descale, " has ", descale.numel(), " values, expected ", expected);
  o.descale = float_pointer(descale, name.descale, a.q);
  return o;
}

bool needs_amax(const PackOperand& o) {
  return o.granularity != Granularity::token && o.granularity != Granularity::block;
}

// The operands share one tensor of maxima, in the order Q, K, V.
void set_amax(PackParams& params, const PackArguments& a) {
  int64_t total = 0, begin[kPackOperands] = {};
  constexpr int kOrder[] = {kPackQ, kPackK, kPackV};
  for (const int which : kOrder) {
    begin[which] = total;
    const PackOperand& o = params.operand[which];
    if (needs_amax(o)) total += descales_of(o, params.batch, a.key_block, a.q8.size(3));
  }
  const int64_t given = a.amax ? a.amax->numel() : 0;
  require(given == total, "amax has ", given, " values, expected ", total);
  if (total == 0) return;
  float* maxima = float_pointer(*a.amax, "amax", a.q);
  for (const int which : kOrder) {
    if (needs_amax(params.operand[which])) params.operand[which].amax = maxima + begin[which];
  }
}

}  // namespace

const PackEntry& find_pack(const PackArguments& a) {
  require(a.q.dim() == 4 && a.q8.dim() == 4, "q and q8 must have 4 dimensions");
  const ScalarType type = a.q.scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, "q must be bfloat16 or float16");
  const SourceType source = type == ScalarType::Half ? SourceType::fp16 : SourceType::bf16;
  const int64_t head_dim = a.q8.size(3);
  for (int i = 0; i < kPackCount; ++i) {
    const PackEntry& entry = kPacks[i];
    if (entry.head_dim == head_dim && entry.key_block == a.key_block && entry.source == source) return entry;
  }
  fail("no pack kernel for head_dim ", head_dim, ", blocks of ", a.key_block, " keys and ",
       source == SourceType::fp16 ? "float16" : "bfloat16", " is among the ", kPackCount, " that are built");
}

PackParams pack_params(const PackArguments& a) {
  PackParams params{};
  const int64_t batch = a.q.size(0), heads = a.q.size(1), head_dim = a.q.size(3);
  require(a.k.dim() == 4 && a.v.dim() == 4, "k and v must have 4 dimensions");
  const int64_t kv_heads = a.k.size(1), seqlen_k = a.k.size(2);
  if (batch == 0 || heads == 0 || kv_heads == 0 || a.q.size(2) == 0 || seqlen_k == 0) {
    fail("empty tensors take no launch: q has shape ", shape_text(a.q), ", k has shape ", shape_text(a.k));
  }
  require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= a.q8.size(3), "q has head_dim ", head_dim,
          ", which must be a multiple of 8, at most the ", a.q8.size(3), " of q8");
  require_shape(a.k, "k", {batch, kv_heads, seqlen_k, head_dim});
  require_shape(a.v, "v", {batch, kv_heads, seqlen_k, head_dim});
  params.batch = to_int(batch, "the batch size");
  params.head_dim = to_int(head_dim, "the head_dim");
  params.q_flip = a.negate_q ? 0x80808080u : 0;
  constexpr Names kQ{"q", "q8", "q_descale", "q_granularity", "score_amax"};
  constexpr Names kK{"k", "k8", "k_descale", "k_granularity", "score_amax"};
  constexpr Names kV{"v", "v8", "v_descale", "v_granularity", "v_amax"};
  params.operand[kPackQ] = operand_of(a, kPackQ, kQ, a.q, a.q8, a.q_descale, a.q_granularity, a.score_amax);
  params.operand[kPackK] = operand_of(a, kPackK, kK, a.k, a.k8, a.k_descale, a.k_granularity, a.score_amax);
  params.operand[kPackV] = operand_of(a, kPackV, kV, a.v, a.v8, a.v_descale, a.v_granularity, a.v_amax);
  require(params.operand[kPackQ].granularity != Granularity::block, "q_granularity: Q has no blocks of keys");
  set_amax(params, a);
  params.hadamard = a.hadamard;
  if (a.k_mean) {
    require_shape(*a.k_mean, "k_mean", {batch, kv_heads, a.q8.size(3)});
    params.k_mean = float_pointer(*a.k_mean, "k_mean", a.q);
  }
  return params;
}

}  // namespace fp8cutlass
