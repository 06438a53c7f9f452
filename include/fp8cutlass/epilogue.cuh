// From float32 accumulators to the output tensor and the LSE.
// V's packed columns (layout.h) give a lane 8 neighbouring output columns of each 32: one 16-byte store (e4m3: 8).
#pragma once

#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/params.h"
#include "fp8cutlass/softmax.cuh"

namespace fp8cutlass {

struct OutBf16 {
  static constexpr int kBytes = 2;
  __device__ static void store(uint8_t* to, const float (&x)[8], float) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(bf16x2(x[0], x[1]), bf16x2(x[2], x[3]), bf16x2(x[4], x[5]), bf16x2(x[6], x[7]));
  }
};
struct OutFp16 {
  static constexpr int kBytes = 2;
  __device__ static void store(uint8_t* to, const float (&x)[8], float) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(fp16x2(x[0], x[1]), fp16x2(x[2], x[3]), fp16x2(x[4], x[5]), fp16x2(x[6], x[7]));
  }
};
struct OutE4m3 {
  static constexpr int kBytes = 1;
  __device__ static void store(uint8_t* to, const float (&x)[8], float scale) {
    *reinterpret_cast<uint2*>(to) = make_uint2(e4m3x4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
                                               e4m3x4(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
  }
};

// What a row's O is multiplied by: 1 / (sum of its quantised P); 0 for a row that saw no key. NaN stays NaN.
__device__ __forceinline__ float normaliser(float sum, float v_descale) {
  return sum != 0.f ? v_descale * reciprocal_approx(sum) : 0.f;
}

// A row that saw no key is 0, even where a NaN in V met its zeros.
template <int kBlocks>
__device__ __forceinline__ void clear_dead_rows(float (&o)[kBlocks][4], const float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (sum[r] != 0.f) continue;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) o[n][2 * r] = o[n][2 * r + 1] = 0.f;
  }
}

// Writes the rows of one 16-row fragment. `row` is the query row of this lane's row 0 (row 1 is 8 below), which begins
// at element `begin` of O; rows at or past `rows` are not written. `v_descale` multiplies every column,
// `column_descale` each its own (null: 1). Of kShares CTAs that store the same rows, `rank` stores every kShares-th
// group of 32 columns.
template <class Out, int kShares = 1, int kBlocks>
__device__ __forceinline__ void store_rows(const ForwardParams& p, int64_t begin, int rows, int row,
                                           const float (&o)[kBlocks][4], const float (&sum)[2], float v_descale,
                                           const float* column_descale, float out_scale, int rank = 0) {
  const int t = threadIdx.x % 4;
  uint8_t* const first = static_cast<uint8_t*>(p.o) + (begin + 8 * t) * Out::kBytes;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row + 8 * r;
    if (i >= rows) continue;
    const float norm = normaliser(sum[r], v_descale);
    uint8_t* const to = first + r * (8 * Out::kBytes) * p.o_stride_row;
#pragma unroll
    for (int g = 0; g < kBlocks / 4; ++g) {
      if (kShares > 1 && g % kShares != rank) continue;
      const int column = 32 * g + 8 * t;
      float x[8];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        x[2 * n] = o[4 * g + n][2 * r] * norm;
        x[2 * n + 1] = o[4 * g + n][2 * r + 1] * norm;
      }
      if (column_descale != nullptr) {
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] *= column_descale[column + c];
      }
      Out::store(to + 32 * g * Out::kBytes, x, out_scale);
    }
  }
}

// LSE in natural units from a lane's part of the unquantised sums and their reference; all lanes of a quad must call.
// -inf where no key was seen. `place` tells where that of a row of the sequence, which has `rows`, lies in p.lse.
template <class Place>
__device__ __forceinline__ void store_lse(const ForwardParams& p, const Place& place, int rows, int row,
                                          const float (&exact)[2], const float (&ref)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(exact[r]);
    const int i = row + 8 * r;
    if (threadIdx.x % 4 == 0 && i < rows) p.lse[place(i)] = sum == 0.f ? -INFINITY : kLn2 * (ref[r] + log2f(sum));
  }
}

// The sink of a head joins the sums of quantised P, which are relative to `ref`. A row that saw no key has no sum, and
// stays so. `excess`: how many times too large the P of a softmax are on average. The LSE gets the sink afterwards,
// from who asked for it: here it would cost registers where there are none.
__device__ __forceinline__ void add_sink(float (&sum)[2], const float (&ref)[2], const ForwardParams& p, int head,
                                         float excess) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (sum[r] != 0.f) sum[r] = fmaf(excess, exp2_approx(kLog2e * p.sinks[head] - ref[r]), sum[r]);
}

// Raises p.amax to the largest |o| that store_rows wrote with the same arguments, before the output scale.
template <int kShares = 1, int kBlocks>
__device__ __forceinline__ void store_amax(const ForwardParams& p, int rows, int row, const float (&o)[kBlocks][4],
                                           const float (&sum)[2], float v_descale, const float* column_descale,
                                           int rank = 0) {
  float amax = 0.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= rows) continue;
    const float norm = normaliser(sum[r], v_descale);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (kShares > 1 && n / 4 % kShares != rank) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 32 * (n / 4) + 8 * (threadIdx.x % 4) + 2 * (n % 4) + i;
        const float descale = column_descale != nullptr ? column_descale[column] : 1.f;
        amax = fmaxf(amax, fabsf(o[n][2 * r + i] * norm * descale));
      }
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lane));
  // Non-negative floats order like their bits, so an integer maximum serves.
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(p.amax), __float_as_int(amax));
}

}  // namespace fp8cutlass
