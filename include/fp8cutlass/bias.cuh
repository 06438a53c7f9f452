// Scores with a bias, on the accumulators of one 16-row fragment: a lane has the keys 8 n + 2 t and the next of its two
// rows (t = lane % 4).
#pragma once

#include <type_traits>

#include "fp8cutlass/bias_params.h"
#include "fp8cutlass/load_words.cuh"
#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/softmax.cuh"

namespace fp8cutlass {

constexpr int kBlocksAhead = 2;  // whose values are read one by one at a time

// Where a lane finds the bias of a tile of keys. What lies beyond the last row or key is not read: these take its
// place.
struct BiasTile {
  const char* row[2];  // the tile's first key
  int column;          // the lane's first key in a block
  int keys;            // from the tile's first one to the last that there is
  bool pairs;          // of 16 bits: all keys are there, and two are read at once

  // Of rows `row` and row + 8 of a head whose values begin at element `head`, and the keys from `key` on.
  __device__ __forceinline__ BiasTile(const Bias& bias, int64_t head, int first_row, int rows, int key, int key_count,
                                      int tile_keys)
      : column(2 * (threadIdx.x % 4)), keys(key_count - key), pairs(bias.pairs && keys >= tile_keys) {
    const int bytes = bias.type == BiasType::f32 ? 4 : 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = head + min(first_row + 8 * r, rows - 1) * bias.stride_row + key * bias.stride_key;
      row[r] = static_cast<const char*>(bias.data) + bytes * at;
    }
  }

  // Of row r, key `key` of the tile, of elements of so many bytes. `before` is a word that was read some blocks ago:
  // the address waits for it, as those of all blocks at once would take more registers than there are.
  __device__ __forceinline__ const char* at(const Bias& bias, int bytes, int r, int key, uint32_t before) const {
    const int zero = int(before & (unsigned(keys) >> 31));
    return row[r] + bytes * (min(key + zero, keys - 1) * bias.stride_key);
  }
};

// For kernels without BiasRows.
struct NoRows {};

// Reads a 16-bit bias of a tile, two keys a word, where it lies, ahead of its use: what is read before a wait for a
// product comes while it is made. Float32 would take the registers of the scores once more, and is read where it is
// added.
template <int kBlocks>
__device__ __forceinline__ void read_halves(uint32_t (&words)[kBlocks][2], const Bias& bias, const BiasTile& tile) {
  if (bias.type == BiasType::f32) return;
  if (tile.pairs) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) words[n][r] = load_word(tile.row[r] + 2 * tile.column + 16 * n);
  } else {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t before = n < kBlocksAhead ? 0 : words[n - kBlocksAhead][r];
        const auto half = [&](int key) { return load_half_word(tile.at(bias, 2, r, key, before)); };
        words[n][r] = half(8 * n + tile.column) | half(8 * n + tile.column + 1) << 16;
      }
  }
}

// Scores become logits in octaves: slope[r] octaves a score unit, and the bias, in float32. A bias of 16 bits is in
// `words`. One of float32 is in `copied` where that is BiasRows and the bias lies in chunks, else in memory.
template <int kBlocks, class Rows>
__device__ __forceinline__ void add_bias(float (&s)[kBlocks][4], const float (&slope)[2],
                                         const uint32_t (&words)[kBlocks][2], const Bias& bias, const BiasTile& tile,
                                         Rows&& copied) {
  const auto add_two = [&](int n, int r, float2 two) {
    s[n][2 * r] = fmaf(s[n][2 * r], slope[r], two.x * kLog2e);
    s[n][2 * r + 1] = fmaf(s[n][2 * r + 1], slope[r], two.y * kLog2e);
  };
  const auto add = [&](const auto& value) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) add_two(n, r, value(n, r));
  };
  if (bias.type == BiasType::bf16)
    return add([&](int n, int r) {
      return make_float2(__uint_as_float(words[n][r] << 16), __uint_as_float(words[n][r] & 0xFFFF0000u));
    });
  if (bias.type == BiasType::fp16)
    return add([&](int n, int r) { return make_float2(half_low(words[n][r]), half_high(words[n][r])); });
  if constexpr (!std::is_same_v<std::decay_t<Rows>, NoRows>) {
    if (bias.chunks) return copied.read_floats(bias, add_two);
  }
  add([&](int n, int r) {
    const uint32_t before = n < kBlocksAhead ? 0 : __float_as_uint(s[n - kBlocksAhead][2 * r]);
    const auto word = [&](int key) { return __uint_as_float(load_word(tile.at(bias, 4, r, key, before))); };
    return make_float2(word(8 * n + tile.column), word(8 * n + tile.column + 1));
  });
}

}  // namespace fp8cutlass
