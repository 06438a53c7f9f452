#include "pack_arguments.h"

#include <cmath>

#include "check.h"

namespace fp8cutlass {

namespace {

Granularity granularity_of(int64_t position, const char* name, bool is_v) {
  const int64_t columns = static_cast<int64_t>(Granularity::channel);
  const int64_t last = static_cast<int64_t>(Granularity::group);
  require(position >= 0 && position <= last, name, " is ", position, ", outside of 0..", last);
  require(is_v || position != columns, name, ": only V has channels");
  return static_cast<Granularity>(position);
}

// Descales of an operand with these sizes.
int64_t descales_of(const PackOperand& o, int64_t batch, int64_t key_block, int64_t head_dim) {
  const int tokens = o.granularity == Granularity::token ? o.rows : o.tokens;
  return descale_count(o.granularity, batch * o.heads, tokens, key_block, head_dim);
}

struct Names {
  const char *x, *out, *descale, *granularity, *amax;
};

// What the operands have in common.
struct Sizes {
  int64_t batch, columns, head_dim;  // columns are the caller's, head_dim is the kernel's
};

Sizes sizes_of(const PackArguments& a) {
  const View& x = first_operand(a);
  const std::optional<View>& out = a.q ? a.q8 : a.k ? a.k8 : a.v8;
  require(out.has_value(), "the output of the first operand is absent");
  require(x.dim() == 4 && out->dim() == 4, "operands and their outputs must have 4 dimensions");
  return {x.size(0), x.size(3), out->size(a.q || a.k ? 3 : 2)};
}

// An operand that is absent has no rows, and so no CTAs.
PackOperand operand_of(const PackArguments& a, const Sizes& sizes, PackOrder which, const Names& name,
                       const std::optional<View>& given, const std::optional<View>& given_out,
                       const std::optional<View>& given_descale, int64_t granularity, double amax) {
  require(given.has_value() == given_out.has_value() && given.has_value() == given_descale.has_value(), name.x, ", ",
          name.out, " and ", name.descale, " must be all there or all absent");
  if (!given) return {};
  const View &x = *given, &out = *given_out, &descale = *given_descale, &first = first_operand(a);
  const bool packed = which == kPackV;
  const int64_t batch = sizes.batch, head_dim = sizes.head_dim;
  if (x.dim() != 4) fail(name.x, " must have 4 dimensions, got shape ", shape_text(x));
  require_shape(x, name.x, {batch, x.size(1), x.size(2), sizes.columns});
  if (x.numel() == 0) fail("empty tensors take no launch: ", name.x, " has shape ", shape_text(x));
  require(x.scalar_type() == first.scalar_type(), name.x, " is not of the type of the other operands");
  require_same_device(x, name.x, first);
  PackOperand o{};
  o.x = x.data();
  require_aligned(o.x, name.x);
  const Strides from = row_strides(x, name.x, false);
  o.stride_batch = from.batch, o.stride_head = from.head, o.stride_row = from.row;
  o.heads = to_int(x.size(1), name.x);
  o.tokens = to_int(a.block_rows && which != kPackQ ? *a.block_rows : x.size(2), name.x);
  o.granularity = granularity_of(granularity, name.granularity, packed);
  o.rows = o.tokens;
  // Descales of single keys are read in whole tiles.
  const bool whole_tiles = packed || (o.granularity == Granularity::token && which == kPackK);
  if (whole_tiles) o.rows = to_int(padded_keys(o.tokens), name.x);
  o.limit = fp8_limit(amax, name.amax);
  o.limit_reciprocal = static_cast<float>(1.0 / amax);

  require(out.scalar_type() == ScalarType::Byte, name.out, " must be a uint8 view of e4m3 data");
  require_same_device(out, name.out, first);
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
  o.descale = float_pointer(descale, name.descale, first);
  return o;
}

bool needs_amax(const PackOperand& o) { return o.x != nullptr && beyond_blocks(o.granularity); }

// The operands share one tensor of maxima, in the order Q, K, V.
void set_amax(PackParams& params, const PackArguments& a, const Sizes& sizes) {
  int64_t total = 0, begin[kPackOperands] = {};
  constexpr int kOrder[] = {kPackQ, kPackK, kPackV};
  for (const int which : kOrder) {
    begin[which] = total;
    const PackOperand& o = params.operand[which];
    if (needs_amax(o)) total += descales_of(o, params.batch, a.key_block, sizes.head_dim);
  }
  const int64_t given = a.amax ? a.amax->numel() : 0;
  require(given == total, "amax has ", given, " values, expected ", total);
  if (total == 0) return;
  float* maxima = float_pointer(*a.amax, "amax", first_operand(a));
  for (const int which : kOrder) {
    if (needs_amax(params.operand[which])) params.operand[which].amax = maxima + begin[which];
  }
}

// Q and K become s8 where K has descales of groups, whether it is there or not.
bool makes_integers(const PackArguments& a) { return a.k_granularity == static_cast<int64_t>(Granularity::group); }

// V does where its tokens have descales.
bool makes_integers_of_v(const PackArguments& a) { return a.v_granularity == static_cast<int64_t>(Granularity::token); }

}  // namespace

const View& first_operand(const PackArguments& a) {
  const std::optional<View>& first = a.q ? a.q : a.k ? a.k : a.v;
  require(first.has_value(), "q, k and v are all absent");
  return *first;
}

const PackEntry& find_pack(const PackArguments& a) {
  const ScalarType type = first_operand(a).scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, "operands must be bfloat16 or float16");
  const SourceType source = type == ScalarType::Half ? SourceType::fp16 : SourceType::bf16;
  const int64_t head_dim = sizes_of(a).head_dim;
  for (int i = 0; i < kPackCount; ++i) {
    const PackEntry& entry = kPacks[i];
    if (entry.head_dim == head_dim && entry.key_block == a.key_block && entry.source == source &&
        entry.integer == makes_integers(a) && entry.integer_v == makes_integers_of_v(a))
      return entry;
  }
  fail("no pack kernel for head_dim ", head_dim, ", blocks of ", a.key_block, " keys and ",
       source == SourceType::fp16 ? "float16" : "bfloat16", " is among the ", kPackCount, " that are built");
}

PackParams pack_params(const PackArguments& a) {
  PackParams params{};
  const Sizes sizes = sizes_of(a);
  require(sizes.columns > 0 && sizes.columns % 8 == 0 && sizes.columns <= sizes.head_dim, "operands have head_dim ",
          sizes.columns, ", which must be a multiple of 8, at most the ", sizes.head_dim, " of their outputs");
  params.batch = to_int(sizes.batch, "the batch size");
  params.head_dim = to_int(sizes.columns, "the head_dim");
  params.q_flip = a.negate_q ? kFlip : 0;
  constexpr Names kQ{"q", "q8", "q_descale", "q_granularity", "score_amax"};
  constexpr Names kK{"k", "k8", "k_descale", "k_granularity", "score_amax"};
  constexpr Names kV{"v", "v8", "v_descale", "v_granularity", "v_amax"};
  params.operand[kPackQ] = operand_of(a, sizes, kPackQ, kQ, a.q, a.q8, a.q_descale, a.q_granularity, a.score_amax);
  params.operand[kPackK] = operand_of(a, sizes, kPackK, kK, a.k, a.k8, a.k_descale, a.k_granularity, a.score_amax);
  params.operand[kPackV] = operand_of(a, sizes, kPackV, kV, a.v, a.v8, a.v_descale, a.v_granularity, a.v_amax);
  if (a.k && a.v) require_shape(*a.v, "v", {sizes.batch, a.k->size(1), a.k->size(2), sizes.columns});
  require(!a.q || params.operand[kPackQ].granularity != Granularity::block, "q_granularity: Q has no blocks of keys");
  // The kernels of integers know no other: a row of Q, the keys of a lane.
  const Granularity of_q = params.operand[kPackQ].granularity;
  require(!a.q || !makes_integers(a) || of_q == Granularity::token, "q_granularity: integers have a descale a token");
  require(!makes_integers_of_v(a) || makes_integers(a),
          "v_granularity: a descale a token goes with integers in Q and K");
  require(of_q != Granularity::group && params.operand[kPackV].granularity != Granularity::group,
          "q_granularity, v_granularity: only K has groups");
  set_amax(params, a, sizes);
  params.hadamard = a.hadamard;
  if (a.k_mean) {
    require(a.k.has_value(), "k_mean goes with k, which is absent");
    require_shape(*a.k_mean, "k_mean", {sizes.batch, a.k->size(1), sizes.head_dim});
    params.k_mean = float_pointer(*a.k_mean, "k_mean", *a.k);
  }
  return params;
}

}  // namespace fp8cutlass
