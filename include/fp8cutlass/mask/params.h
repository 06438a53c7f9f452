// What the kernel that packs a boolean mask gets (csrc/masks.cpp). Plain C++ without CUDA or torch.
#pragma once

#include <cstdint>

namespace fp8cutlass::masking {

constexpr int kMaskThreads = 1024;

// A size of 1 stands for all rows, or for all keys, and its stride is 0. What is written is as walk/tile_mask.h has it.
struct PackMaskParams {
  const uint8_t* seen;                                           // (batch, heads, rows, columns), a byte an element
  int64_t stride_batch, stride_head, stride_row, stride_column;  // in bytes
  uint32_t* bits;                                                // (batch, heads, row_tiles, bit_tiles, kMaskTileWords)
  int* tiles;                                                    // (batch, heads, row_tiles, key_tiles)
  int* counts;                                                   // (batch, heads, row_tiles)
  int heads, rows, columns;
  int keys;  // of the call, which `columns` may be 1 of
  int row_tiles, key_tiles, bit_tiles;
  int word;  // bytes that are read at a time: 16 or 4 where rows are contiguous, so long and so aligned, else 1
};

}  // namespace fp8cutlass::masking
