// A ragged batch from bf16 or fp16 to the result: one kernel quantises and packs, another lists the row tiles, the
// third attends. Nobody waits for the lengths.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "registry.h"

namespace fp8cutlass {

using torch::stable::Tensor;

struct RaggedTensors {
  const Tensor& q;  // (T, H, D), bf16 or fp16, D at most the variant's head_dim
  const Tensor& k;  // (Tk, Hkv, D)
  const Tensor& v;
  const Tensor& cu_q;  // (sequences + 1,) int32
  const Tensor& cu_k;
  const std::optional<Tensor>& used_q;  // (sequences,) int32
  const std::optional<Tensor>& used_k;
  const std::optional<Tensor>& lse;  // (H, T), written
  // uint8, written: Q, K and V in FP8, their descales and the plan, each from a multiple of 256 bytes on; where absent,
  // it is allocated.
  const std::optional<Tensor>& workspace;
  const std::optional<Tensor>& sinks;  // (H,) float32
};

struct RaggedNumbers {
  double score_amax, v_amax;  // what the largest |x| of a group becomes, of Q and K and of V
  double scale;               // of any sign
  int64_t window_left, window_right;
  bool bottom_right;
  bool leave_q;    // to the attention kernel, where it can quantise rows itself
  double softcap;  // a logit x becomes softcap * tanh(x / softcap); 0 leaves it
};

// Launches all three on the current stream and returns the result, (T, H, the variant's head_dim), contiguous; rows
// that belong to no sequence are 0, and their LSE -inf. Throws std::runtime_error naming the argument.
Tensor attend_ragged(const RaggedNumbers& numbers, const RaggedTensors& tensors, const VariantEntry& variant);

}  // namespace fp8cutlass
