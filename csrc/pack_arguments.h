// From torch tensors to the launch ABI of the kernels that quantise and pack, with every invariant checked that a wrong
// call could turn into a wrong address.
#pragma once

#include <cstdint>
#include <optional>

#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

// One call as the operator receives it. Granularities are positions in Granularity. Outputs are uint8 views of e4m3. An
// operand may be absent, with its output and its descale; one at least is there.
struct PackArguments {
  int64_t key_block;
  std::optional<View> q;  // (B, H, Sq, D), bf16 or fp16
  std::optional<View> k;  // (B, Hkv, Sk, D)
  std::optional<View> v;
  int64_t q_granularity, k_granularity, v_granularity;
  double score_amax, v_amax;  // what the largest |x| of a group becomes, of Q and K and of V
  bool negate_q;
  std::optional<View> q8;  // (B, H, Sq, head_dim), dense rows
  std::optional<View> k8;  // (B, Hkv, Sk, head_dim), likewise
  std::optional<View> v8;  // (B, Hkv, head_dim, ceil(Sk / 128) * 128), packed
  std::optional<View> q_descale;
  std::optional<View> k_descale;
  std::optional<View> v_descale;
  std::optional<View> amax;  // zeros, one for each descale of an operand per tensor, head or channel: Q, K, V
  bool hadamard;
  std::optional<View> k_mean;  // (B, Hkv, head_dim), where keys are smoothed
  // Of a ragged batch: rows of K and V in blocks, which k8, v8 and descales are as long as.
  std::optional<int64_t> block_rows;
};

// The first operand that is there: its type and device are those of all. Throws std::runtime_error where there is none.
const View& first_operand(const PackArguments& arguments);

// The compiled kernel for these operands. Throws std::runtime_error where there is none.
const PackEntry& find_pack(const PackArguments& arguments);

// Parameters of its launch. Throws std::runtime_error naming the argument.
PackParams pack_params(const PackArguments& arguments);

}  // namespace fp8cutlass
