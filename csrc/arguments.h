// From torch tensors to the launch ABI, with every invariant checked that a wrong call could turn into a wrong address.
#pragma once

#include <cstdint>
#include <optional>

#include "fp8cutlass/params.h"
#include "tensors.h"

namespace fp8cutlass {

// One call as the operator receives it. FP8 tensors arrive as uint8 views.
struct Arguments {
  View q;  // (B, H, Sq, D)
  View k;  // (B, Hkv, Sk, D)
  View v;  // (B, Hkv, D, ceil(Sk / 128) * 128), packed
  View q_descale;
  View k_descale;
  View v_descale;
  std::optional<View> out_descale;  // (1,), exactly when out is FP8
  View out;                         // (B, H, Sq, D)
  std::optional<View> lse;          // (B, H, Sq)
  std::optional<View> amax;         // (1,)
  double scale;
  int64_t causal_offset;
};

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
