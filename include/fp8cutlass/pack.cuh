// Parts of the kernels that quantise Q, K and V and pack V. Their sum is python/fp8cutlass/quantize.py and pack.py, bit
// for bit: every product is rounded to float32 on its own, and denormals count.
//
// A row of head_dim elements is shared by kLanes neighbouring lanes. A chunk is 8 elements, 16 bytes in and 8 bytes
// out; lane l owns the chunks l, l + kLanes, ..., so that the lanes of a row always touch one contiguous piece of
// memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/layout.h"
#include "fp8cutlass/pack_params.h"
#include "fp8cutlass/quantise.cuh"

namespace fp8cutlass::packing {

constexpr int kThreads = kPackThreads;

// ---- which block ----------------------------------------------------------------------------------------------------

struct Block {
  int operand;  // PackOrder
  int head;     // of B * heads
  int index;    // inside the head
};

template <class Params>
__device__ __forceinline__ Block find_block(const Params& p) {
  int cta = blockIdx.x, operand = 0;
  while (cta >= p.operand[operand].ctas) cta -= p.operand[operand++].ctas;
  const int blocks = p.operand[operand].blocks;
  return {operand, cta / blocks, cta % blocks};
}

// ---- loads ----------------------------------------------------------------------------------------------------------

// A lane's chunks of rows first, first + kThreads / kLanes, ... of a block that starts at row `base`. Rows past the
// last token and columns past D are zeros, which change no maximum and become zero bytes.
template <int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void load(uint4 (&x)[kPasses][kChunks], const PackOperand& o, const Block& block, int base,
                                     int head_dim) {
  const int lane = threadIdx.x % kLanes, first = base + threadIdx.x / kLanes;
  const int batch = block.head / o.heads, head = block.head % o.heads;
  const int64_t start = batch * o.stride_batch + head * o.stride_head + first * o.stride_row + 8 * lane;
  const uint16_t* row = static_cast<const uint16_t*>(o.x) + start;
  const int64_t step = kThreads / kLanes * o.stride_row;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass, row += step) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool inside = first + pass * (kThreads / kLanes) < o.tokens && 8 * (lane + kLanes * i) < head_dim;
      x[pass][i] = inside ? __ldg(reinterpret_cast<const uint4*>(row + 8 * kLanes * i)) : uint4{0, 0, 0, 0};
    }
  }
}

// ---- maxima ---------------------------------------------------------------------------------------------------------

// Largest finite |x| of a lane's chunks of each row. Rare: infinities and NaN are left out of the maxima and become
// `mark` in x: kMagnitude is a NaN of both types, which converts to the NaN of e4m3, 0x7f.
template <class Source, int kPasses, int kChunks>
__device__ __forceinline__ void finite_magnitudes(uint32_t (&largest)[kPasses], uint4 (&x)[kPasses][kChunks],
                                                  uint32_t mark) {
  uint32_t all = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) all = __vmaxu2(all, largest[pass] = magnitude(x[pass]));
  if (is_finite<Source>(all)) return;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    uint4 finite[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      finite[i] = without_non_finite<Source>(x[pass][i], 0);
      x[pass][i] = without_non_finite<Source>(x[pass][i], mark);
    }
    largest[pass] = magnitude(finite);
  }
}

// What is computed from x afterwards is computed there: the compiler would convert all of x before it branches, once
// for all branches, and hold it in twice the registers.
template <int kChunks>
__device__ __forceinline__ void keep(uint4 (&x)[kChunks]) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) asm volatile("" : "+r"(x[i].x), "+r"(x[i].y), "+r"(x[i].z), "+r"(x[i].w));
}

template <int kPasses>
__device__ __forceinline__ uint32_t largest_of(const uint32_t (&largest)[kPasses]) {
  uint32_t all = largest[0];
#pragma unroll
  for (int pass = 1; pass < kPasses; ++pass) all = __vmaxu2(all, largest[pass]);
  return larger_half(all);
}

// Over the lanes of a row.
template <int kLanes>
__device__ __forceinline__ uint32_t row_max(uint32_t magnitudes) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)
    magnitudes = __vmaxu2(magnitudes, __shfl_xor_sync(~0u, magnitudes, step));
  return larger_half(magnitudes);
}

// Over the CTA; every thread must come here, once. of_warp: in shared memory.
__device__ __forceinline__ uint32_t block_max(uint32_t bits, uint32_t (&of_warp)[kThreads / 32]) {
  bits = __reduce_max_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
  __syncthreads();
  delay_point(16);
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) bits = max(bits, of_warp[warp]);
  return bits;
}

// ---- V: transposed through shared memory ----------------------------------------------------------------------------

// out[q] gets byte q of each of the four words, in their order.
__device__ __forceinline__ void transpose_bytes(uint32_t (&out)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t ab01 = __byte_perm(a, b, 0x5140), ab23 = __byte_perm(a, b, 0x7362);
  const uint32_t cd01 = __byte_perm(c, d, 0x5140), cd23 = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab01, cd01, 0x5410), out[1] = __byte_perm(ab01, cd01, 0x7632);
  out[2] = __byte_perm(ab23, cd23, 0x5410), out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// Writes the staged rows as columns, packed. A warp takes 64 keys and 32 columns at a time: four lanes write 64
// neighbouring bytes of a column. `out` is the head's V^T at the block's first key, `pitch` the bytes of a column, of
// which `keys` are left from here on, a multiple of 64.
template <class Stage, int kRows, int kHeadDim>
__device__ __forceinline__ void store_packed(uint8_t* out, int64_t pitch, int keys, const uint8_t* stage) {
  constexpr int kParts = kRows / 64, kPieces = kParts * (kHeadDim / 32);
  const int lane = threadIdx.x % 32;
  for (int piece = threadIdx.x / 32; piece < kPieces; piece += kThreads / 32) {
    const int part = piece % kParts, column = 32 * (piece / kParts) + 4 * (lane / 4);
    const int key = 64 * part + 16 * (lane % 4);
    if (64 * part >= keys) continue;
    uint32_t packed[4][4];  // [column][positions 4t..4t+3]
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const auto word = [&](int k) {
        return *reinterpret_cast<const uint32_t*>(stage + Stage::offset(key, k, column));
      };
      uint32_t of_column[4];
      transpose_bytes(of_column, word(2 * t), word(2 * t + 1), word(8 + 2 * t), word(9 + 2 * t));
#pragma unroll
      for (int q = 0; q < 4; ++q) packed[q][t] = of_column[q];
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint4* target = reinterpret_cast<uint4*>(out + packed_column(column + q) * pitch + key);
      *target = uint4{packed[q][0], packed[q][1], packed[q][2], packed[q][3]};
    }
  }
}

// ---- the first pass, for groups larger than a block -----------------------------------------------------------------

// Floats that are not negative order like their bits.
__device__ __forceinline__ void raise(float* amax, float value) {
  if (value > 0.f) atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

// Raises of_column (zeroed, shared memory) to the largest |x| of each column of a block without infinities and NaN.
template <int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void column_max(uint32_t* of_column, const uint4 (&x)[kPasses][kChunks]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint32_t largest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t pairs[4] = {x[pass][i].x, x[pass][i].y, x[pass][i].z, x[pass][i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[j] = __vmaxu2(largest[j], pairs[j] & kMagnitude);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int step = kLanes; step < 32; step *= 2)
        largest[j] = __vmaxu2(largest[j], __shfl_xor_sync(~0u, largest[j], step));
      if (lane < kLanes) {
        uint32_t* column = of_column + 8 * (lane + kLanes * i) + 2 * j;
        atomicMax(column, largest[j] & 0xffff);
        atomicMax(column + 1, largest[j] >> 16);
      }
    }
  }
}

}  // namespace fp8cutlass::packing
