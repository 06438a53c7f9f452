// An additive mask as a kernel gets it. Plain C++.
#pragma once

#include <cstdint>

namespace fp8cutlass {

enum class BiasType { f32, bf16, fp16 };

// Added to scores times the softmax scale. Strides are in elements, 0 where sizes share values.
struct Bias {
  const void* data;  // (B, H, Sq, Sk)
  int64_t stride_batch, stride_head, stride_row, stride_key;
  BiasType type;
  bool pairs;   // of 16 bits: two keys, the first an even one, are neighbours, aligned to the size of both
  bool chunks;  // as many keys as 16 bytes hold, the first a multiple of them, are neighbours, aligned to 16 bytes
};

}  // namespace fp8cutlass
