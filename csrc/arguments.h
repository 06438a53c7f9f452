// From torch tensors to the launch ABI, with every invariant checked that a wrong call could turn into a wrong address.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

using torch::stable::Tensor;

// One call as the operator receives it. FP8 tensors arrive as uint8 views.
struct Arguments {
  const Tensor& q;  // (B, H, Sq, D)
  const Tensor& k;  // (B, Hkv, Sk, D)
  const Tensor& v;  // (B, Hkv, D, ceil(Sk / 128) * 128), packed
  const Tensor& q_descale;
  const Tensor& k_descale;
  const Tensor& v_descale;
  const std::optional<Tensor>& out_descale;  // (1,), exactly when out is FP8
  const Tensor& out;                         // (B, H, Sq, D)
  const std::optional<Tensor>& lse;          // (B, H, Sq)
  const std::optional<Tensor>& amax;         // (1,)
  double scale;
  int64_t causal_offset;
};

// Where a diagnostic variant writes; shapes as in DiagnosticOutputs.
struct DiagnosticTensors {
  const Tensor& scores;
  const Tensor& p;
  const Tensor& weight;
  const Tensor& tile_o;
};

// Parameters of a launch of `variant`, all but `sm_count` and `diag`. Throws std::runtime_error naming the argument.
ForwardParams forward_params(const Arguments& arguments, const VariantEntry& variant);

// Pointers for `diag`, checked against the shapes in `params`.
DiagnosticOutputs diagnostic_outputs(const DiagnosticTensors& tensors, const Tensor& q, const ForwardParams& params,
                                     const VariantEntry& variant);

}  // namespace fp8cutlass
