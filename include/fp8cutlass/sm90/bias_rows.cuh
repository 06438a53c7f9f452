// A bias on its way through shared memory, a warp's rows.
#pragma once

#include "fp8cutlass/bias.cuh"
#include "fp8cutlass/sm89/copy.cuh"

namespace fp8cutlass {

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

}  // namespace fp8cutlass
