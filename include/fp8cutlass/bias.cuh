// Scores with a bias, on the accumulators of one 16-row fragment: a lane has the keys 8 n + 2 t and the next of its two
// rows (t = lane % 4).
#pragma once

#include "fp8cutlass/bias_params.h"
#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/sm89/copy.cuh"
#include "fp8cutlass/softmax.cuh"

namespace fp8cutlass {

constexpr int kBlocksAhead = 2;  // whose values are read one by one at a time

// Loads that keep their place among waits for products.
__device__ __forceinline__ uint32_t load_word(const void* pointer) {
  uint32_t word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(pointer));
  return word;
}

__device__ __forceinline__ uint32_t load_half_word(const void* pointer) {
  uint16_t half;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(half) : "l"(pointer));
  return half;
}

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

// A warp's 16 rows of a bias in shared memory, in chunks of 16 bytes. The chunks of a row are turned by its number, so
// that no two rows that are read at once share banks. Where all rows have the same values (a step of 0), only the first
// is copied, and is read for each.
template <int kKeys>
struct BiasRows {
  static constexpr int kHalfChunks = kKeys / 8, kFloatChunks = kKeys / 4;  // of a row
  union {
    alignas(16) uint8_t halves[16][kHalfChunks][16];
    alignas(16) uint8_t floats[16][kFloatChunks][16];
  };

  // Of 16 bits: eight rows are read at once.
  __device__ __forceinline__ uint8_t* half_chunk(int row, int n) { return halves[row][n ^ (row % 8)]; }
  // Of float32: two chunks of each of four rows are.
  __device__ __forceinline__ uint8_t* float_chunk(int row, int n) { return floats[row][n ^ (2 * (row % 4))]; }

  // Copies a tile of elements of kBytes that begins with row `first_row` and key `key` of a head whose values begin at
  // element `head`, and returns while it is on its way. Keys past the last one become zeros, which a mask hides, and
  // are not read.
  template <int kBytes>
  __device__ __forceinline__ void copy(const Bias& bias, int64_t head, int first_row, int rows, int key, int keys) {
    constexpr int kChunk = 16 / kBytes, kChunks = kKeys / kChunk;
    static_assert(kChunks <= 32, "a lane copies one chunk of a row");
    const int lane = threadIdx.x % 32, n = lane % kChunks;
    const int bytes_there = min(max(kBytes * (keys - key - kChunk * n), 0), 16);
    constexpr int kStep = 32 / kChunks;  // rows that the warp copies at once
    const int64_t pitch = kBytes * bias.stride_row;
    int row = lane / kChunks;
    const uint8_t* from = static_cast<const uint8_t*>(bias.data) + kBytes * (head + key + kChunk * n) +
                          min(first_row + row, rows - 1) * pitch;
    const int copied = bias.stride_row == 0 ? 1 : 16;
#pragma unroll
    for (int i = 0; i < 16 / kStep; ++i) {
      if (row >= copied) break;
      const uint8_t* to = kBytes == 4 ? float_chunk(row, n) : half_chunk(row, n);
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                   "r"(bytes_there)
                   : "memory");
      row += kStep;
      if (first_row + row < rows) from += kStep * pitch;  // past the last row another one takes its place
    }
    sm89::commit_copies();
  }

  // What was copied of 16 bits, two keys a word. Then the rows may be copied to again.
  __device__ __forceinline__ void read(const Bias& bias, uint32_t (&words)[kHalfChunks][2]) {
    wait();
    const int lane = threadIdx.x % 32, row = bias.stride_row == 0 ? 0 : lane % 16;
#pragma unroll
    for (int n = 0; n < kHalfChunks; n += 2) {
      uint32_t r[4];
      sm89::load_matrices(r, half_chunk(row, n + lane / 16));
      words[n][0] = r[0], words[n][1] = r[1], words[n + 1][0] = r[2], words[n + 1][1] = r[3];
    }
    __syncwarp();
  }

  // Until what was copied is there.
  __device__ __forceinline__ void wait() {
    sm89::wait_copies<0>();
    __syncwarp();
  }

  // Of what was copied of float32, add(n, r, keys 8 n + 2 t and the next of the lane's row r), with t = lane % 4.
  // Blocks of four whose places differ by a constant follow one another, which saves registers. Then the rows may be
  // copied to again.
  template <class Add>
  __device__ __forceinline__ void read_floats(const Bias& bias, const Add& add) {
    wait();
    const int lane = threadIdx.x % 32, row = bias.stride_row == 0 ? 0 : lane / 4, step = bias.stride_row == 0 ? 0 : 8;
#pragma unroll
    for (int first = 0; first < 4; ++first) {
      const uint8_t* at = float_chunk(row, 2 * first + lane % 4 / 2) + 8 * (lane % 2);
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = first; n < kKeys / 8; n += 4)
          add(n, r, *reinterpret_cast<const float2*>(at + 16 * (r * step * kFloatChunks + 2 * (n - first))));
    }
    __syncwarp();
  }
};

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

// Scores become logits in octaves: slope[r] octaves a score unit, and the bias, in float32. Of 16 bits it is in
// `words`, and of float32 in `copied`, or where it lies.
template <int kBlocks>
__device__ __forceinline__ void add_bias(float (&s)[kBlocks][4], const float (&slope)[2],
                                         const uint32_t (&words)[kBlocks][2], const Bias& bias, const BiasTile& tile,
                                         BiasRows<8 * kBlocks>& copied) {
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
  if (bias.type == BiasType::bf16) {
    add([&](int n, int r) {
      return make_float2(__uint_as_float(words[n][r] << 16), __uint_as_float(words[n][r] & 0xFFFF0000u));
    });
  } else if (bias.type == BiasType::fp16) {
    add([&](int n, int r) { return make_float2(half_low(words[n][r]), half_high(words[n][r])); });
  } else if (bias.chunks) {
    copied.read_floats(bias, add_two);
  } else {
    add([&](int n, int r) {
      const uint32_t before = n < kBlocksAhead ? 0 : __float_as_uint(s[n - kBlocksAhead][2 * r]);
      const auto word = [&](int key) { return __uint_as_float(load_word(tile.at(bias, 4, r, key, before))); };
      return make_float2(word(8 * n + tile.column), word(8 * n + tile.column + 1));
    });
  }
}

}  // namespace fp8cutlass
