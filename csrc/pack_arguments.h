// From torch tensors to the launch ABI of the kernels that quantise and pack, with every invariant checked that a wrong
// call could turn into a wrong address.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "fp8cutlass/pack_params.h"

namespace fp8cutlass {

using torch::stable::Tensor;

// One call as the operator receives it. Granularities are positions in Granularity. Outputs are uint8 views of e4m3. An
// operand may be absent, with its output and its descale; one at least is there.
struct PackArguments {
  int64_t key_block;
  const std::optional<Tensor>& q;  // (B, H, Sq, D), bf16 or fp16
  const std::optional<Tensor>& k;  // (B, Hkv, Sk, D)
  const std::optional<Tensor>& v;
  int64_t q_granularity, k_granularity, v_granularity;
  double score_amax, v_amax;  // what the largest |x| of a group becomes, of Q and K and of V
  bool negate_q;
  const std::optional<Tensor>& q8;  // (B, H, Sq, head_dim), dense rows
  const std::optional<Tensor>& k8;  // (B, Hkv, Sk, head_dim), likewise
  const std::optional<Tensor>& v8;  // (B, Hkv, head_dim, ceil(Sk / 128) * 128), packed
  const std::optional<Tensor>& q_descale;
  const std::optional<Tensor>& k_descale;
  const std::optional<Tensor>& v_descale;
  const std::optional<Tensor>& amax;  // zeros, one for each descale of an operand per tensor, head or channel: Q, K, V
  bool hadamard;
  const std::optional<Tensor>& k_mean;  // (B, Hkv, head_dim), where keys are smoothed
};

// The first operand that is there: its type and device are those of all. Throws std::runtime_error where there is none.
const Tensor& first_operand(const PackArguments& arguments);

// The compiled kernel for these operands. Throws std::runtime_error where there is none.
const PackEntry& find_pack(const PackArguments& arguments);

// Parameters of its launch. Throws std::runtime_error naming the argument.
PackParams pack_params(const PackArguments& arguments);

}  // namespace fp8cutlass
