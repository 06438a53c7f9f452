// A ragged batch of FP8 operands to the result: one kernel packs V, and copies Q and K where they cannot be read as
// they lie or Q is lowered, another lists the row tiles, the third attends. Nobody waits for the lengths.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "registry.h"

namespace fp8cutlass {

using torch::stable::Tensor;

struct RaggedFp8Tensors {
  const Tensor& q;  // (T, H, D), e4m3, D a multiple of 16, at most the variant's head_dim; 16-byte aligned rows
  const Tensor& k;  // (Tk, Hkv, D)
  const Tensor& v;
  const Tensor& q_descale;  // (1,) or (sequences, H), float32, contiguous
  const Tensor& k_descale;  // (1,) or (sequences, Hkv)
  const Tensor& v_descale;
  const Tensor& cu_q;  // (sequences + 1,) int32
  const Tensor& cu_k;
  const std::optional<Tensor>& used_q;  // (sequences,) int32
  const std::optional<Tensor>& used_k;
  const std::optional<Tensor>& lse;    // (H, T), written
  const std::optional<Tensor>& sinks;  // (H,) float32
};

struct RaggedFp8Numbers {
  double score_amax;  // what quantised Q and K may not exceed for the kernel: Q is lowered where it is below 448
  double scale;       // of any sign
  int64_t window_left, window_right;
  bool bottom_right;
  double softcap;
};

// Launches all three on the current stream and returns the result, (T, H, the variant's head_dim), contiguous; rows
// that belong to no sequence are 0, and their LSE -inf. Throws std::runtime_error naming the argument.
Tensor attend_ragged_fp8(const RaggedFp8Numbers& numbers, const RaggedFp8Tensors& tensors, const VariantEntry& variant);

}  // namespace fp8cutlass
