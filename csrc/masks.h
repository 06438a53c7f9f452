// A mask in lists of tiles or a bias, from torch tensors to the launch ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "mask_params.h"
#include "registry.h"

namespace fp8cutlass {

// Bm, Hm and R are 1 where batches, heads or rows share a list.
struct MaskTensors {
  const std::optional<torch::stable::Tensor>& tiles;   // (Bm, Hm, R, key tiles) int32
  const std::optional<torch::stable::Tensor>& counts;  // (Bm, Hm, R) int32
  const std::optional<torch::stable::Tensor>& bits;  // (Bm, Hm, R, key tiles or 1, kMaskTileWords) int32; may be absent
  const std::optional<torch::stable::Tensor>& bias;  // broadcasts to (B, H, Sq, Sk), float32, bf16 or fp16, any strides
};

// Of a launch of `variant` with these parameters. Throws std::runtime_error naming the argument, also where it is
// missing or not asked for.
MaskParams mask_params(const MaskTensors& tensors, const ForwardParams& params, const VariantEntry& variant,
                       int device);

// Packs a boolean mask (Bm, Hm, rows, columns), any strides, where 1 stands for all rows or all keys: writes tiles,
// counts and bits, contiguous, on the current stream. Throws std::runtime_error naming the argument.
void pack_mask(const torch::stable::Tensor& seen, int64_t keys, const torch::stable::Tensor& tiles,
               const torch::stable::Tensor& counts, const torch::stable::Tensor& bits);

}  // namespace fp8cutlass
