// One call from bf16 or fp16 to the result: quantise and pack into a workspace, then attend.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "masks.h"
#include "registry.h"

namespace fp8cutlass {

using torch::stable::Tensor;

// What calls on operands of one shape, layout and type have in common: the operator takes it as one tensor of
// numbers, in the order of call.def, as every argument costs the host a fifth of a microsecond on its way through
// torch.
struct AttendConstants {
#define X(type, name, meaning) type name;
#include "call.def"
#undef X
};

// Reads them: float64, contiguous, on the CPU. Throws std::runtime_error where they are not.
AttendConstants attend_constants(const Tensor& numbers);

struct AttendTensors {
  const Tensor& q;  // (B, H, Sq, D), bf16 or fp16, D at most the variant's head_dim
  const Tensor& k;  // (B, Hkv, Sk, D)
  const Tensor& v;
  const std::optional<Tensor>& k_mean;       // (B, Hkv, head_dim), written: keys are smoothed where it is given
  const std::optional<Tensor>& out_descale;  // (1,), exactly when out is FP8
  const std::optional<Tensor>& lse;          // (B, H, Sq)
  const std::optional<Tensor>& amax;         // (1,), zero
  const std::optional<Tensor>& sinks;        // (H,) float32: a logit of each head without a value
  MaskTensors mask;
};

// Launches both kernels on the current stream and returns the result, (B, H, Sq, the variant's head_dim), dense.
// `variant` is the entry that the constants number. Throws std::runtime_error naming the argument.
Tensor attend(const AttendConstants& constants, const AttendTensors& tensors, const VariantEntry& variant);

}  // namespace fp8cutlass
