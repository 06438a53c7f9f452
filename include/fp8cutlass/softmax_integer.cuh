// Softmax of one tile whose scores are sums of 8-bit integers, in s32; python/fp8cutlass/emulator/integer.py specifies
// it. What softmax.cuh says of lanes, rows and weights holds here, too. P is e4m3 by its code, or u8 by an exponential.
//
// A lane has a slope of its own, as K's descale is that of the keys in its columns: its largest score is found among
// integers, and lanes are compared in float32.
#pragma once

#include "fp8cutlass/integer.cuh"
#include "fp8cutlass/softmax.cuh"

namespace fp8cutlass {

// A sum of products begins at the bits of 1.5 * 2^23 instead of 0. For |s| < 2^22 what comes out is the float
// 1.5 * 2^23 + s, without a conversion or an addition. 127 * 127 * 256, the largest |s|, is 0.98 of 2^22. As integers
// these bits are in the order of s.
constexpr uint32_t kRaise = 0x4B400000u;
constexpr float kRaiseValue = 12582912.f;
constexpr int kLeastScore = int(kRaise) - (1 << 22);  // stands for the maximum of a lane that sees no key

// Above one code a score unit, a unit is more than the rounding of an offset may lose.
constexpr float kMaxIntegerSlope = 1.f;

__device__ __forceinline__ float score_of(uint32_t raised) { return __uint_as_float(raised) - kRaiseValue; }

// The largest of four lanes that share a row; NaN where one has it.
__device__ __forceinline__ float row_most(float x) {
  x = most_or_nan(x, __shfl_xor_sync(~0u, x, 1));
  return most_or_nan(x, __shfl_xor_sync(~0u, x, 2));
}

// Of row r: this lane's largest score, raised, its logit, and the largest logit of the row; -inf where no key is seen.
struct LargestLogit {
  float own, logit, top;
};

template <int kBlocks>
__device__ __forceinline__ LargestLogit largest_logit(const uint32_t (&s)[kBlocks][4], int r, float slope) {
  int largest = kLeastScore;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) largest = __vimax3_s32(largest, int(s[n][2 * r]), int(s[n][2 * r + 1]));
  const float own = __int_as_float(largest);
  const float logit = largest == kLeastScore ? -INFINITY : __fmul_rn(own - kRaiseValue, slope);
  return {own, logit, row_most(logit)};
}

// Scores become codes, as floats that are not rounded yet. slope[r]: of this lane, logits in codes (1/8 octave) a score
// unit, from kMinSlope to kMaxSlope, or NaN, which the weight then is. `keep` as of softmax_exp2.
template <int kBlocks, class Keep>
__device__ __forceinline__ void softmax_of_integers(uint32_t (&s)[kBlocks][4], const float (&slope)[2],
                                                    float (&weight)[2], bool want_exact, const Keep& keep) {
  float used[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto [own, logit, top] = largest_logit(s, r, slope[r]);
    used[r] = fminf(slope[r], kMaxIntegerSlope);
    // -inf for a lane that sees no key, NaN where nobody sees one: both make code 0 of its scores, -inf.
    offset[r] = fmaf(-own, used[r], kTop<Code::linear> + (logit - top));
    // Code c stands for 2^(c / 8 - 7). -inf becomes the weight of a dead row, a NaN remains.
    weight[r] = most_or_nan(fmaf(top, 0.125f, 7.f - kTop<Code::linear> / 8), kDeadWeight);
  }
  for (int turn = unpredicated(want_exact); turn > 0; --turn) {
    // A sum, masked with this zero, ties one step to the next: see softmax_by_code.
    const uint32_t zero = turn - 1;
    float exact[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t x = s[n][2 * r + i] ^ (__float_as_uint(exact[r]) & zero);
          exact[r] += exp2_approx(fmaf(score_of(x), slope[r] * 0.125f, -weight[r]));
        }
    keep(exact[0], exact[1]);
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = __float_as_uint(fmaf(__uint_as_float(s[n][i]), used[i / 2], offset[i / 2]));
}

// Scores become P in steps of `unit`, as floats that are not rounded yet: what a key adds to O, the largest of a row
// 255. slope[r]: of this lane, logits in octaves a score unit, or NaN. v_descale: of the tile's keys; 0 takes no range
// from others, NaN reaches the rows that see its key. masked: whether a score of the tile may be hidden. sum[r]: this
// lane's part of the unrounded P, which divides O.
template <int kBlocks>
__device__ __forceinline__ void softmax_to_bytes(uint32_t (&s)[kBlocks][4], const float (&slope)[2],
                                                 const float* v_descale, bool masked, float (&weight)[2],
                                                 float (&unit)[2], float (&sum)[2]) {
  float offset[2], largest[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = largest_logit(s, r, slope[r]).top;
    weight[r] = most_or_nan(top, kDeadWeight);  // of a dead row; a NaN remains
    offset[r] = top == -INFINITY ? 0.f : -top;
    sum[r] = 0.f;
  }
  const auto* descales = reinterpret_cast<const float2*>(v_descale) + threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 two = descales[4 * n];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = exp2_approx(fmaf(score_of(s[n][i]), slope[i / 2], offset[i / 2]));
      sum[i / 2] += p;
      float share = __fmul_rn(p, i % 2 ? two.y : two.x);
      if (masked && s[n][i] == kHiddenScore<uint32_t>) share = 0.f;  // whatever the descale
      largest[i / 2] = most_or_nan(largest[i / 2], share);
      s[n][i] = __float_as_uint(share);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float most = row_most(largest[r]);
    unit[r] = most == 0.f ? 1.f : __fmul_rn(most, 1.f / 255.f);
    const float steps = 1.f / unit[r];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) s[n][i] = __float_as_uint(__uint_as_float(s[n][i]) * steps);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

// Codes, or P in steps, to the A operands of P V, as pack_p of softmax.cuh.
template <int kBlocks>
__device__ __forceinline__ void pack_p(uint32_t (&p)[kBlocks / 4][4], const uint32_t (&s)[kBlocks][4]) {
#pragma unroll
  for (int step = 0; step < kBlocks / 4; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t (&x)[4] = s[4 * step + 2 * h], (&y)[4] = s[4 * step + 2 * h + 1];
      p[step][2 * h] = u8x4(x[0], x[1], y[0], y[1]);
      p[step][2 * h + 1] = u8x4(x[2], x[3], y[2], y[3]);
    }
}

}  // namespace fp8cutlass
