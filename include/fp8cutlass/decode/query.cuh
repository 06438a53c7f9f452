// The rows of Q of a unit, in shared memory as f16. A row is divided by a power of two of its own, so that f16 has room
// for it; what it loses is below 2^-24 of the row's largest magnitude. Rows are asked for while the share before is
// worked on, and become f16 where they lie.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/rows.h"
#include "fp8cutlass/decode/stream.cuh"
#include "fp8cutlass/delay.cuh"

namespace fp8cutlass::decode {

__device__ __forceinline__ float from_half_bits(uint32_t bits, bool bf16) {
  return bf16 ? __uint_as_float(bits << 16) : half_low(bits);
}

// Q of a unit, and what else has to be there when its share begins.
template <int kHeadDim, int kRows, int kWarps>
struct Queries {
  static constexpr bool kPanels = kRows == kWideRows;  // they become panels of wgmma
  static constexpr int kPitch = kPanels ? 2 * kHeadDim : kQueryPitch<kHeadDim>;
  alignas(kPanels ? 1024 : 16) uint8_t rows[kRows * kPitch];
  float slope[kRows];  // what a product of the row and a key is multiplied by to get a score as the softmax wants it
  float k_descale[kWarps], v_descale[kWarps];  // each warp's own copy
};

// Rows of a warp: every kWarps-th.
template <int kRows, int kWarps>
constexpr int kOwnRows = kRows / kWarps;

template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void ask_queries(const DecodeParams& p, const Share& share,
                                            Queries<kHeadDim, kRows, kWarps>& to) {
  static_assert(kRows % kWarps == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = p.batch.by_group.by;
#pragma unroll
  for (int r = 0; r < kOwnRows<kRows, kWarps>; ++r) {
    const int row = warp + r * kWarps, at = share.row + row, query = quotient(at, p.batch.by_group);
    const bool there = query < share.of.queries;
    const int token = share.of.query + (there ? query : 0), head = share.kv_head * group + at - query * group;
    const auto* const from = static_cast<const uint8_t*>(p.q) + 2 * (steps(token, p.q_row) + steps(head, p.q_head));
    for (int column = 4 * lane; column < kHeadDim; column += 128)
      copy8(to.rows + row * to.kPitch + 2 * column, from + 2 * column, there ? 8 : 0);
  }
  const auto copy_descale = [&](float* descale, const HeadDescale& of) {
    if (of.base == nullptr) {
      *descale = of.value;
      return;
    }
    copy4(descale, reinterpret_cast<const uint8_t*>(of.base + share.sequence * of.sequence + share.kv_head * of.head),
          4);
  };
  if (lane == 0) copy_descale(&to.k_descale[warp], p.k_descale), copy_descale(&to.v_descale[warp], p.v_descale);
}

// A descale of a head as it is multiplied by.
__device__ __forceinline__ float limited(float descale) { return fminf(fmaxf(descale, 0x1p-126f), 0x1p126f); }

// What was asked for is there; each warp has it for itself. Rows that become panels are all read before one is written:
// their warps come to `meet`.
template <int kHeadDim, int kRows, int kWarps, class Meet = int>
__device__ __forceinline__ void prepare_queries(const DecodeParams& p, Queries<kHeadDim, kRows, kWarps>& queries,
                                                const Meet& meet = {}) {
  constexpr int kPasses = (kHeadDim / 4 + 31) / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float unit = p.softcap > 0.f ? 1.f / p.softcap : 1.4426950408889634f;
  const float k_descale = limited(queries.k_descale[warp]);
  constexpr bool kPanels = Queries<kHeadDim, kRows, kWarps>::kPanels;
  static_assert(!kPanels || kPasses == 1);
  uint2 panel[kOwnRows<kRows, kWarps>];
  delay_point(24);
#pragma unroll
  for (int r = 0; r < kOwnRows<kRows, kWarps>; ++r) {
    const int row = warp + r * kWarps;
    uint8_t* const words = queries.rows + row * queries.kPitch;
    float x[kPasses][4], most = 0.f;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int column = 4 * (lane + 32 * i);
      uint2 two = make_uint2(0, 0);
      if (column < kHeadDim) two = *reinterpret_cast<const uint2*>(words + 2 * column);
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
      const auto halves = [&] {
        return make_uint2(fp16x2(x[i][0] * shrink, x[i][1] * shrink), fp16x2(x[i][2] * shrink, x[i][3] * shrink));
      };
      if constexpr (kPanels) {
        panel[r] = halves();
      } else if (column < kHeadDim) {
        *reinterpret_cast<uint2*>(words + 2 * column) = halves();
      }
    }
    if (lane == 0) queries.slope[row] = __uint_as_float(exponent << 23) * (p.scale * unit * k_descale);
  }
  if constexpr (kPanels) {
    meet();
#pragma unroll
    for (int r = 0; r < kOwnRows<kRows, kWarps>; ++r) {
      const int at = panel_offset(warp + r * kWarps, lane / 2 % 8) + lane % 2 * 8;
      if (4 * lane < kHeadDim) *reinterpret_cast<uint2*>(queries.rows + lane / 16 * kPanelBytes + at) = panel[r];
    }
  }
}

}  // namespace fp8cutlass::decode
