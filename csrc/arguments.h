// From torch tensors to the launch ABI, with every invariant checked that a wrong call could turn into a wrong address.
#pragma once

#include <cstdint>
#include <optional>

#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

// How a kernel is to quantise a Q that it gets in 16 bits, each row with a scale of its own.
struct QuerySource {
  double amax;  // what the largest |q| of a row becomes
  bool negate;  // turn the sign of Q
  bool early;   // the kernel before in the stream does not write Q, and began after what does had ended
};

// For a q whose rows have so many columns. Throws std::runtime_error where `variant` cannot quantise it.
QueryScaling query_scaling(const View& q, int64_t columns, const QuerySource& source, const VariantEntry& variant);

// One call as the operator receives it. FP8 tensors arrive as uint8 views.
struct Arguments {
  View q;  // (B, H, Sq, D); with `source` bf16 or fp16, and D may be less than the kernel's, a multiple of 8
  View k;  // (B, Hkv, Sk, D)
  View v;  // (B, Hkv, D, ceil(Sk / 128) * 128), packed
  std::optional<View> q_descale;  // absent exactly with `source`
  View k_descale;
  View v_descale;
  std::optional<View> out_descale;  // (1,), exactly when out is FP8
  View out;                         // (B, H, Sq, D)
  std::optional<View> lse;          // (B, H, Sq)
  std::optional<View> amax;         // (1,)
  double scale;
  int64_t causal_offset;
  int64_t window_offset;
  std::optional<QuerySource> source;
  bool merge_lse = false;
  std::optional<View> sinks;  // (H,): a logit of each head without a value
  double softcap = 0;         // a logit x becomes softcap * tanh(x / softcap), exactly with kernels that cap scores
};

// Sets `scale`, `cap` and `sinks`, as a kernel reads them. Throws std::runtime_error where `variant` cannot.
void set_scores(ForwardParams& params, const VariantEntry& variant, double scale, double softcap,
                const std::optional<View>& sinks, const View& q);

// Where a diagnostic variant writes; shapes as in DiagnosticOutputs.
struct DiagnosticTensors {
  View scores;
  View p;
  View weight;
  View tile_o;
};

// Parameters of a launch of `variant`, all but `sm_count` and `diag`. Throws std::runtime_error naming the argument.
ForwardParams forward_params(const Arguments& arguments, const VariantEntry& variant);

// Pointers for `diag`, checked against the shapes in `params`.
DiagnosticOutputs diagnostic_outputs(const DiagnosticTensors& tensors, const View& q, const ForwardParams& params,
                                     const VariantEntry& variant);

}  // namespace fp8cutlass
