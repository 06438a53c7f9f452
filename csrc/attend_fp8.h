// One call on operands of which K and V are FP8 already, to the result.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "attend.h"
#include "registry.h"

namespace fp8cutlass {

struct Fp8Tensors {
  const Tensor&
      q;  // (B, H, Sq, D), e4m3 or e5m2, D a multiple of 16, at most the variant's head_dim; 16-byte aligned rows
  const Tensor& k;  // (B, Hkv, Sk, D)
  const Tensor& v;
  // Float32, any strides: (), (1,), (H,), (B, H) or canonical; absent where the constants have a number.
  const std::optional<Tensor>& q_descale;
  const std::optional<Tensor>& k_descale;
  const std::optional<Tensor>& v_descale;
  const std::optional<Tensor>& out_descale;  // (1,), exactly when out is FP8
  const std::optional<Tensor>& lse;          // (B, H, Sq)
  const std::optional<Tensor>& amax;         // (1,), zero
  const std::optional<Tensor>& sinks;        // (H,) float32
  MaskTensors mask;
};

struct PackedTensors {
  const Tensor& q;          // (B, H, Sq, D), bf16 or fp16, D at most the variant's head_dim
  const Tensor& k;          // (B, Hkv, Sk, head_dim), uint8
  const Tensor& v;          // (B, Hkv, head_dim, ceil(Sk / 128) * 128), packed
  const Tensor& k_descale;  // as the variant reads them
  const Tensor& v_descale;
  const std::optional<Tensor>& out_descale;
  const std::optional<Tensor>& lse;
  const std::optional<Tensor>& amax;
  const std::optional<Tensor>& sinks;  // (H,) float32
  MaskTensors mask;
  const std::optional<Tensor>& out;  // (B, H, Sq, head_dim), where the result is to go: any strides of aligned rows
};

// Packs V, lowers Q where scores are to fit f16, copies Q and K and spreads descales where the kernel cannot read them
// as they lie, in one launch; then attends. Returns (B, H, Sq, the variant's head_dim), dense. Throws
// std::runtime_error naming the argument.
Tensor attend_fp8(const AttendConstants& constants, const Fp8Tensors& tensors, const VariantEntry& variant);

// Quantises Q, then attends. The same result, which is `out` where it is given.
Tensor attend_packed(const AttendConstants& constants, const PackedTensors& tensors, const VariantEntry& variant);

}  // namespace fp8cutlass
