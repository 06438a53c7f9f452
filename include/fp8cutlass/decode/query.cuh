// The rows of Q of a unit, in shared memory as f16. A row is divided by a power of two of its own, so that f16 has room
// for it; what it loses is below 2^-24 of the row's largest magnitude.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/rows.h"
#include "fp8cutlass/decode/stream.cuh"

namespace fp8cutlass::decode {

__device__ __forceinline__ float from_half_bits(uint32_t bits, bool bf16) {
  return bf16 ? __uint_as_float(bits << 16) : half_low(bits);
}

// slope[row]: what a product of the row and a key is multiplied by to get a score in the unit that the softmax wants.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void load_queries(const DecodeParams& p, const Share& share, uint8_t* queries,
                                             float* slope) {
  constexpr int kPasses = (kHeadDim / 4 + 31) / 32;
  const int lane = threadIdx.x % 32, group = p.batch.heads / p.batch.kv_heads;
  const float k_descale = p.k_descale.base[share.sequence * p.k_descale.sequence + share.kv_head * p.k_descale.head];
  const float unit = p.softcap > 0.f ? 1.f / p.softcap : 1.4426950408889634f;
  constexpr int kOwn = kRows / kWarps;  // rows of a warp: all are asked for before the first is used
  static_assert(kRows % kWarps == 0);
  uint2 bits[kOwn][kPasses];
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const int at = share.row + int(threadIdx.x) / 32 + r * kWarps, query = at / group;
    const int head = share.kv_head * group + at % group;
    const auto* const from =
        static_cast<const uint8_t*>(p.q) + 2 * ((share.of.query + query) * p.q_row + head * p.q_head);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int column = 4 * (lane + 32 * i);
      bits[r][i] = make_uint2(0, 0);
      if (query < share.of.queries && column < kHeadDim)
        bits[r][i] = *reinterpret_cast<const uint2*>(from + 2 * column);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const int row = int(threadIdx.x) / 32 + r * kWarps;
    float x[kPasses][4], most = 0.f;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint2 two = bits[r][i];
      x[i][0] = from_half_bits(two.x & 0xffff, p.q_bf16), x[i][1] = from_half_bits(two.x >> 16, p.q_bf16);
      x[i][2] = from_half_bits(two.y & 0xffff, p.q_bf16), x[i][3] = from_half_bits(two.y >> 16, p.q_bf16);
#pragma unroll
      for (int j = 0; j < 4; ++j) most = fmaxf(most, fabsf(x[i][j]));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const uint32_t exponent = clamped(int(__float_as_uint(most) >> 23), 1, 253);
    const float shrink = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int column = 4 * (lane + 32 * i);
      if (column < kHeadDim)
        *reinterpret_cast<uint2*>(queries + row * kQueryPitch<kHeadDim> + 2 * column) =
            make_uint2(fp16x2(x[i][0] * shrink, x[i][1] * shrink), fp16x2(x[i][2] * shrink, x[i][3] * shrink));
    }
    if (lane == 0) slope[row] = __uint_as_float(exponent << 23) * (p.scale * unit * k_descale);
  }
}

}  // namespace fp8cutlass::decode
