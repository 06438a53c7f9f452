// How much room the plan and the packed operands of a ragged batch take. Plain C++ without CUDA or torch headers.
#pragma once

#include <cstdint>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

// Row tiles that a batch has at most: each sequence begins a tile of its own.
inline int64_t most_row_tiles(int64_t total_q, int64_t sequences, int tile_m) {
  return total_q / tile_m + (total_q < sequences ? total_q : sequences);
}

// Blocks of packed V and of block descales that a batch has at most: each sequence begins a block of its own.
inline int64_t ragged_blocks(int64_t total_k, int64_t sequences, int key_block) {
  return (total_k + key_block - 1) / key_block + sequences;
}

// Keys of as many blocks as packed V takes, whose columns are a multiple of 128.
inline int64_t ragged_columns(int64_t total_k, int64_t sequences, int key_block) {
  int64_t columns = ragged_blocks(total_k, sequences, key_block) * key_block;
  while (columns % 128 != 0) columns += key_block;
  return columns;
}

}  // namespace fp8cutlass
