// Two partial results of attention as one.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace fp8cutlass {

// Merges `to` (B, H, S, D), float32, bf16 or fp16, and its LSE (B, H, S) float32 into `out` and `lse`, float32, on the
// current stream. Any strides whose last one is 1; D and the strides of both results are multiples of 4, their data are
// aligned to 4 elements. Throws std::runtime_error naming the argument.
void merge(const torch::stable::Tensor& out, const torch::stable::Tensor& lse, const torch::stable::Tensor& to,
           const torch::stable::Tensor& to_lse);

}  // namespace fp8cutlass
