#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "check.h"

namespace fp8cutlass {

namespace {

const uint8_t* fp8_pointer(const View& tensor, const char* name, const View& q) {
  if (tensor.dim() != 4) fail(name, " must have 4 dimensions, got shape ", shape_text(tensor));
  require(tensor.scalar_type() == ScalarType::Byte, name, " must be a uint8 view of FP8 data");
  require_same_device(tensor, name, q);
  const void* pointer = tensor.data();
  require_aligned(pointer, name);
  return static_cast<const uint8_t*>(pointer);
}

// Q in 16 bits, its strides in bytes.
void set_source(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  if (a.q.dim() != 4) fail("q must have 4 dimensions, got shape ", shape_text(a.q));
  require(!a.q_descale, "q_descale is given, but q is no FP8");
  params.query = query_scaling(a.q, a.q.size(3), *a.source, variant);
  params.q = static_cast<const uint8_t*>(a.q.data());
  const Strides q = row_strides(a.q, "q", false);
  const int64_t bytes = a.q.element_size();
  params.q_stride_batch = bytes * q.batch, params.q_stride_head = bytes * q.head, params.q_stride_row = bytes * q.row;
}

void set_query(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  require(a.q.size(3) == variant.head_dim, "q has head_dim ", a.q.size(3), ", variant ", variant.id, " takes ",
          variant.head_dim);
  require(a.q_descale.has_value(), "q_descale is missing");
  const Strides q = row_strides(a.q, "q", false);
  params.q_stride_batch = q.batch, params.q_stride_head = q.head, params.q_stride_row = q.row;
  params.q_descale = float_pointer(*a.q_descale, "q_descale", a.q);
}

void set_inputs(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  if (a.source) {
    set_source(params, a, variant);
  } else {
    params.q = fp8_pointer(a.q, "q", a.q);
    set_query(params, a, variant);
  }
  params.k = fp8_pointer(a.k, "k", a.q);
  params.v = fp8_pointer(a.v, "v", a.q);
  const Strides k = row_strides(a.k, "k", false);
  params.k_stride_batch = k.batch, params.k_stride_head = k.head, params.k_stride_row = k.row;
  require(a.v.is_contiguous(), "v (packed) must be contiguous");
  params.k_descale = float_pointer(a.k_descale, "k_descale", a.q);
  params.v_descale = float_pointer(a.v_descale, "v_descale", a.q);
}

void set_sizes(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  const int64_t batch = a.q.size(0), heads = a.q.size(1), seqlen_q = a.q.size(2), head_dim = variant.head_dim;
  const int64_t kv_heads = a.k.size(1), seqlen_k = a.k.size(2);
  if (batch == 0 || heads == 0 || seqlen_q == 0 || seqlen_k == 0) {
    fail("empty tensors take no launch: q has shape ", shape_text(a.q), ", k has shape ", shape_text(a.k));
  }
  require(kv_heads > 0 && heads % kv_heads == 0, "q has ", heads, " heads, which is no multiple of k's ", kv_heads);
  const int64_t padded = padded_keys(seqlen_k);
  require_shape(a.k, "k", {batch, kv_heads, seqlen_k, head_dim});
  require_shape(a.v, "v (packed)", {batch, kv_heads, head_dim, padded});
  require_shape(a.out, "out", {batch, heads, seqlen_q, head_dim});
  params.batch = to_int(batch, "the batch size");
  params.heads = to_int(heads, "the number of heads of q");
  params.kv_heads = to_int(kv_heads, "the number of heads of k");
  params.seqlen_q = to_int(seqlen_q, "the sequence length of q");
  params.seqlen_k = to_int(seqlen_k, "the sequence length of k");
  params.seqlen_k_padded = to_int(padded, "the padded sequence length of v");
}

// Where a head's descales and those of its rows or blocks lie; 0 where they share one.
struct DescaleSteps {
  int head, part;
};

// A kernel reads as many descales as its scaling mode says; fewer would be read past their end. Kernels that go by
// steps (`coarse`) are served with one a head or one for all as well.
DescaleSteps check_descale(const View& descale, const char* name, Granularity shared_by, const VariantEntry& variant,
                           int64_t batch_heads, int64_t tokens) {
  const int64_t expected = descale_count(shared_by, batch_heads, tokens, variant.key_block, variant.head_dim);
  const int64_t given = descale.numel();
  const bool coarser = variant.coarse && shared_by != Granularity::channel;
  if (coarser && given == 1) return {0, 0};
  if (coarser && given == batch_heads) return {1, 0};
  if (given == expected) return {to_int(expected / batch_heads, name), 1};
  fail(name, " has ", given, " values, variant ", variant.id, " reads ", expected,
       coarser ? ", or one a head, or one" : "");
}

void set_descales(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  const int64_t heads = int64_t{params.batch} * params.heads, kv_heads = int64_t{params.batch} * params.kv_heads;
  // Descales of single keys are read in whole tiles, hence padded; those of blocks are not.
  const auto keys = [&](Granularity g) { return g == Granularity::token ? params.seqlen_k_padded : params.seqlen_k; };
  if (a.q_descale) {
    const DescaleSteps q = check_descale(*a.q_descale, "q_descale", variant.q, variant, heads, params.seqlen_q);
    params.q_descale_head = q.head, params.q_descale_row = q.part;
  }
  const DescaleSteps k = check_descale(a.k_descale, "k_descale", variant.k, variant, kv_heads, keys(variant.k));
  const DescaleSteps v = check_descale(a.v_descale, "v_descale", variant.v, variant, kv_heads, keys(variant.v));
  params.k_descale_head = k.head, params.k_descale_block = k.part;
  params.v_descale_head = v.head, params.v_descale_block = v.part;
  if (variant.k == Granularity::token || variant.k == Granularity::group)
    require_aligned(params.k_descale, "k_descale");  // copied 16 bytes at a time
  if (variant.v == Granularity::token) require_aligned(params.v_descale, "v_descale");
}

void set_outputs(ForwardParams& params, const Arguments& a, const VariantEntry& variant) {
  const bool fp8 = variant.out == OutType::e4m3;
  const ScalarType type = fp8                            ? ScalarType::Byte
                          : variant.out == OutType::bf16 ? ScalarType::BFloat16
                                                         : ScalarType::Half;
  require(a.out.scalar_type() == type || (fp8 && a.out.scalar_type() == ScalarType::Float8_e4m3fn), "out must be ",
          fp8                            ? "a uint8 view of e4m3 data"
          : variant.out == OutType::bf16 ? "bfloat16"
                                         : "float16",
          " for variant ", variant.id);
  require(a.out_descale.has_value() == fp8, "out_descale belongs to FP8 output: out is ", fp8 ? "" : "not ",
          "FP8 and out_descale is ", a.out_descale ? "given" : "missing");
  require_same_device(a.out, "out", a.q);
  params.o = a.out.data();
  require_aligned(params.o, "out");
  const Strides o = row_strides(a.out, "out", true);
  params.o_stride_batch = o.batch, params.o_stride_head = o.head, params.o_stride_row = o.row;
  if (a.out_descale) {
    require_shape(*a.out_descale, "out_descale", {1});
    params.out_descale = float_pointer(*a.out_descale, "out_descale", a.q);
  }
  params.merge_lse = a.merge_lse;
  if (a.lse) {
    require_shape(*a.lse, "lse", {a.q.size(0), a.q.size(1), a.q.size(2)});
    params.lse = float_pointer(*a.lse, "lse", a.q);
  }
  if (a.amax) {
    require_shape(*a.amax, "amax", {1});
    params.amax = float_pointer(*a.amax, "amax", a.q);
  }
}

}  // namespace

QueryScaling query_scaling(const View& q, int64_t columns, const QuerySource& source, const VariantEntry& variant) {
  require(variant.quantises_q, "variant ", variant.id, " takes Q in FP8 only");
  const ScalarType type = q.scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, "q must be bfloat16 or float16");
  require(columns > 0 && columns % 8 == 0 && columns <= variant.head_dim, "q has head_dim ", columns,
          ", which must be a multiple of 8, at most the ", variant.head_dim, " of variant ", variant.id);
  require_aligned(q.data(), "q");
  return {type == ScalarType::Half ? QueryType::fp16 : QueryType::bf16,
          static_cast<int>(columns),
          fp8_limit(source.amax, "score_amax"),
          static_cast<float>(1.0 / source.amax),
          source.early,
          source.negate ? kFlip : 0};
}

void set_scores(ForwardParams& params, const VariantEntry& variant, double scale, double softcap,
                const std::optional<View>& sinks, const View& q) {
  constexpr double kLog2e = 1.4426950408889634;
  require((softcap > 0) == variant.capped, "variant ", variant.id, variant.capped ? " caps" : " does not cap",
          " scores, softcap is ", softcap);
  params.scale = static_cast<float>(variant.capped ? scale / softcap : scale);
  require(std::isfinite(params.scale) && params.scale >= 0, "scale must be a finite float32 >= 0, got ", scale);
  params.cap = static_cast<float>(softcap * kLog2e);
  require(std::isfinite(params.cap), "softcap must be finite in float32, also times log2(e), got ", softcap);
  if (!sinks) return;
  require_shape(*sinks, "sinks", {params.heads});
  params.sinks = float_pointer(*sinks, "sinks", q);
}

ForwardParams forward_params(const Arguments& a, const VariantEntry& variant) {
  ForwardParams params{};
  set_inputs(params, a, variant);
  set_sizes(params, a, variant);
  set_descales(params, a, variant);
  set_outputs(params, a, variant);
  set_scores(params, variant, a.scale, a.softcap, a.sinks, a.q);
  // Beyond these bounds an offset shows every key or none, and the kernels add it to row numbers in 32 bits.
  params.causal_offset =
      static_cast<int>(std::clamp<int64_t>(a.causal_offset, -int64_t{params.seqlen_q}, int64_t{params.seqlen_k}));
  params.window_offset =
      static_cast<int>(std::clamp<int64_t>(a.window_offset, -int64_t{params.seqlen_q}, int64_t{params.seqlen_k}));
  return params;
}

DiagnosticOutputs diagnostic_outputs(const DiagnosticTensors& tensors, const View& q, const ForwardParams& params,
                                     const VariantEntry& variant) {
  const int64_t batch = params.batch, heads = params.heads, seqlen_q = params.seqlen_q;
  const int64_t tiles = (int64_t{params.seqlen_k} + variant.tile_n - 1) / variant.tile_n;
  const int64_t keys = tiles * variant.tile_n;
  require_shape(tensors.scores, "scores", {batch, heads, seqlen_q, keys});
  require_shape(tensors.p, "p", {batch, heads, seqlen_q, keys});
  require_shape(tensors.weight, "weight", {batch, heads, seqlen_q, tiles});
  require_shape(tensors.tile_o, "tile_o", {batch, heads, tiles, seqlen_q, variant.head_dim});
  DiagnosticOutputs outputs{};
  outputs.scores = float_pointer(tensors.scores, "scores", q);
  outputs.p = static_cast<uint8_t*>(dense_pointer(tensors.p, "p", q, ScalarType::Byte, "uint8"));
  outputs.weight = float_pointer(tensors.weight, "weight", q);
  outputs.tile_o = float_pointer(tensors.tile_o, "tile_o", q);
  return outputs;
}

}  // namespace fp8cutlass
