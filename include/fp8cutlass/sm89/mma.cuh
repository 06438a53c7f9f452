// The two matrix products of one warp on one KV tile. A warp owns kFrags x 16 query rows.
// Fragment order follows m16n8k32: lane = 4 * group + t holds rows group and group + 8, columns 2t and 2t + 1 of each
// n8 block.
#pragma once

#include <cstdint>

#include "fp8cutlass/sm89/copy.cuh"

namespace fp8cutlass::sm89 {

__device__ __forceinline__ float value_of(float sum) { return sum; }
__device__ __forceinline__ float value_of(uint32_t sum) { return float(int(sum)); }

template <int kFrags, int kBlocks, class Acc, int kRegs>
__device__ __forceinline__ void set(Acc (&s)[kFrags][kBlocks][kRegs], Acc value) {
#pragma unroll
  for (int f = 0; f < kFrags; ++f)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int r = 0; r < kRegs; ++r) s[f][n][r] = value;
}

// S = begin + Q K^T with Q fragments in registers. Acc is float[4], uint32_t[2] (packed f16) or uint32_t[4] (s32) for
// each n8 block.
template <class Mma, class KTile, int kFrags, int kBlocks, int kSteps, class Acc, int kRegs>
__device__ __forceinline__ void scores(Acc (&s)[kFrags][kBlocks][kRegs], const uint32_t (&q)[kFrags][kSteps][4],
                                       const uint8_t* k_tile, Acc begin) {
  delay_point(15);
  set(s, begin);
  const int lane = lane_offset_b<KTile>();
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2)
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      load_b<KTile>(b, k_tile, lane, 8 * n, step);
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
        Mma::fma(s[f][n], q[f][step], b[0], b[1]);
        Mma::fma(s[f][n + 1], q[f][step], b[2], b[3]);
      }
    }
}

// The same with Q read from shared memory, for variants whose Q fragments would not fit the registers beside O. The k
// steps are a real loop, kStepsAtOnce long: unrolled whole, the compiler loads the fragments of all steps at once and
// runs out of registers.
template <class Mma, int kStepsAtOnce, class QTile, class KTile, int kSteps, int kFrags, int kBlocks, class Acc,
          int kRegs>
__device__ __forceinline__ void scores_from_smem(Acc (&s)[kFrags][kBlocks][kRegs], const uint8_t* q_tile, int row,
                                                 const uint8_t* k_tile, Acc begin) {
  set(s, begin);
  delay_point(13);
  const int q_lane = lane_offset_a<QTile>(row), k_lane = lane_offset_b<KTile>();
#pragma unroll kStepsAtOnce
  for (int step = 0; step < kSteps; ++step) {
    uint32_t q[kFrags][4];
#pragma unroll
    for (int f = 0; f < kFrags; ++f) load_a<QTile>(q[f], q_tile, q_lane, 16 * f, step);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      uint32_t b[4];
      load_b<KTile>(b, k_tile, k_lane, 8 * n, step);
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
        Mma::fma(s[f][n], q[f], b[0], b[1]);
        Mma::fma(s[f][n + 1], q[f], b[2], b[3]);
      }
    }
  }
}

// Row sums of the quantised P as a product with ones: every lane of a quad gets the sums of its two rows.
// The normaliser then sees exactly the P that P V sees, and costs no additions.
template <class Mma, int kFrags, int kSteps>
__device__ __forceinline__ void row_sums(float (&sum)[kFrags][2], const uint32_t (&p)[kFrags][kSteps][4]) {
  constexpr uint32_t kOnes = 0x38383838;  // four times 1.0 in e4m3
#pragma unroll
  for (int f = 0; f < kFrags; ++f) {
    float t[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) Mma::fma(t, p[f][step], kOnes, kOnes);
    sum[f][0] = t[0];
    sum[f][1] = t[2];
  }
}

// O += factor * (P V): the product of one tile starts from zero in the tensor core and is added to O in float32,
// because the tensor core's accumulator keeps 13 fraction bits, and the next tile's integers have another step. `Sum`
// is its type. `sink(f, n, t)` sees each product before it is added. P has as many steps as V, or twice as many: two
// terms for the same keys, one after the other.
template <class Mma, class VTile, class Sum = float, int kFrags, int kBlocks, int kSteps, class Sink>
__device__ __forceinline__ void accumulate_values(float (&o)[kFrags][kBlocks][4],
                                                  const uint32_t (&p)[kFrags][kSteps][4], const uint8_t* v_tile,
                                                  const float (&factor)[kFrags][2], const Sink& sink) {
  constexpr int kTerms = kSteps * 32 / VTile::kRowBytes;
  delay_point(14);
  const int lane = lane_offset_b<VTile>();
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    Sum t[kFrags][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps / kTerms; ++step) {
      uint32_t b[4];
      load_b<VTile>(b, v_tile, lane, 8 * n, step);
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
          Mma::fma(t[f][0], p[f][kTerms * step + term], b[0], b[1]);
          Mma::fma(t[f][1], p[f][kTerms * step + term], b[2], b[3]);
        }
    }
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sink(f, n + h, t[f][h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[f][n + h][i] = fmaf(factor[f][i / 2], value_of(t[f][h][i]), o[f][n + h][i]);
      }
  }
}

}  // namespace fp8cutlass::sm89
