// What happens to a block of Q or K between its load and its quantisation where keys are smoothed or rows rotated:
// python/fp8cutlass/smooth.py, rotate.py and prepare.py, bit for bit.
//
// A row is transformed in float32 by the lanes that hold it and goes back into their registers as bf16. Butterflies of
// elements of one chunk and of a lane's chunks take no exchange; those between lanes take one shuffle an element:
// 2 stages at head_dim 64 and 96, 3 at 128 and 192, 4 at 256. At 3 stages and 4 TB/s the shuffles of Q, K and V
// together are 36% of what an SM can issue, and each block is transformed once.
#pragma once

#include <cfloat>

#include "fp8cutlass/pack.cuh"

namespace fp8cutlass::packing {

constexpr int kSamples = 32;  // keys that a mean is taken over

// Bit d % 32 of word d / 32 set: column d changes its sign.
__constant__ const uint32_t kSigns[8] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                         0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};

// Orders what is computed of y before it and after it; see the other `keep`.
__device__ __forceinline__ void keep(float (&y)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) asm volatile("" : "+f"(y[j]));
}

template <class Source>
__device__ __forceinline__ void unpack(float (&y)[8], const uint4& x) {
  y[0] = Source::low(x.x), y[1] = Source::high(x.x), y[2] = Source::low(x.y), y[3] = Source::high(x.y);
  y[4] = Source::low(x.z), y[5] = Source::high(x.z), y[6] = Source::low(x.w), y[7] = Source::high(x.w);
}

// ---- the mean of some keys ------------------------------------------------------------------------------------------

// Of kCount floats `pitch` apart: neighbours first, then pairs.
template <int kCount>
__device__ __forceinline__ float pairwise_sum(const float* x, int pitch) {
  if constexpr (kCount == 1) {
    return *x;
  } else {
    return __fadd_rn(pairwise_sum<kCount / 2>(x, pitch), pairwise_sum<kCount / 2>(x + kCount / 2 * pitch, pitch));
  }
}

// The mean of a head's samples into `mean`, by every CTA for itself: a kernel in front of this one would take longer
// than 32 rows that the other CTAs of the head keep in L2. The first one writes it to `out`, kHeadDim floats a head.
// `stage` has room for the samples in float32. All threads must come here.
template <class Source, int kLanes, int kChunks, int kHeadDim>
__device__ __forceinline__ void key_mean(float (&mean)[kHeadDim], float* out, const PackOperand& o, const Block& block,
                                         int head_dim, float* stage) {
  static_assert(kHeadDim == 8 * kLanes * kChunks && kHeadDim <= kThreads);
  const int lane = threadIdx.x % kLanes, samples = min(kSamples, o.tokens);
  const uint16_t* head = static_cast<const uint16_t*>(o.x) + block.head / o.heads * o.stride_batch +
                         block.head % o.heads * o.stride_head + 8 * lane;
#pragma unroll
  for (int first = 0; first < kSamples; first += kThreads / kLanes) {
    const int i = first + threadIdx.x / kLanes;
    if (i >= kSamples) break;
    // i * tokens / samples: where there are fewer than kSamples keys, they are all taken.
    const int64_t row = o.tokens < kSamples ? i : int64_t{i} * o.tokens / kSamples;
    const uint16_t* from = head + row * o.stride_row;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = 8 * (lane + kLanes * c);
      uint4 x{0, 0, 0, 0};
      if (i < samples && column < head_dim) x = __ldg(reinterpret_cast<const uint4*>(from + 8 * kLanes * c));
      float y[8];
      unpack<Source>(y, without_non_finite<Source>(x, 0));
      float4* to = reinterpret_cast<float4*>(stage + i * kHeadDim + column);
      to[0] = float4{y[0], y[1], y[2], y[3]}, to[1] = float4{y[4], y[5], y[6], y[7]};
    }
  }
  __syncthreads();
  if (threadIdx.x < kHeadDim) {
    const float sum = pairwise_sum<kSamples>(stage + threadIdx.x, kHeadDim);
    const float m = __fmul_rn(sum, __frcp_rn(static_cast<float>(samples)));
    mean[threadIdx.x] = fabsf(m) <= FLT_MAX ? m : 0.f;
    if (block.index == 0) out[int64_t{block.head} * kHeadDim + threadIdx.x] = mean[threadIdx.x];
  }
  __syncthreads();
}

// ---- the rotation ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void butterfly(float& u, float& v) {
  const float difference = __fsub_rn(u, v);
  u = __fadd_rn(u, v), v = difference;
}

// 1 / sqrt(columns) for a power of two, rounded once.
constexpr float inverse_root(int columns) {
  float root = 1.f;
  for (; columns >= 4; columns /= 4) root *= 0.5f;
  return columns == 2 ? root * 0x1.6a09e6p-1f : root;
}

// A row whose chunks lie in kLanes lanes, in place. All lanes of the warp must come here. Two chunks belong to one
// transform, three to three of their own.
template <int kLanes, int kChunks>
__device__ __forceinline__ void rotate(float (&y)[kChunks][8]) {
  static_assert(kChunks == 2 || kChunks == 3);
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = lane + kLanes * c;
    uint32_t signs = kSigns[chunk / 4] >> 8 * (chunk % 4);
    asm volatile("" : "+r"(signs));
#pragma unroll
    for (int j = 0; j < 8; ++j) y[c][j] = __uint_as_float(__float_as_uint(y[c][j]) ^ (signs << (31 - j) & 0x80000000u));
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if ((j & apart) == 0) butterfly(y[c][j], y[c][j + apart]);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float own = lane & step ? -1.f : 1.f;  // a product with it is exact
#pragma unroll
      for (int j = 0; j < 8; ++j) y[c][j] = __fmaf_rn(own, y[c][j], __shfl_xor_sync(~0u, y[c][j], step));
    }
    keep(y[c]);
  }
  if constexpr (kChunks == 2) {
#pragma unroll
    for (int j = 0; j < 8; ++j) butterfly(y[0][j], y[1][j]);
  }
  constexpr float kScale = inverse_root(8 * kLanes * (kChunks == 2 ? 2 : 1));
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) y[c][j] = __fmul_rn(y[c][j], kScale);
  }
}

// ---- a block --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool transforms(const PackParams& p, const Block& block) {
  return block.operand == kPackK ? p.k_mean != nullptr || p.hadamard : block.operand == kPackQ && p.hadamard;
}

// Rows one after the other, as far as the compiler lets itself be told: it takes several at once where registers are
// left, and a few words over.
template <class Source, bool kSmooth, bool kRotate, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void transform_rows(uint4 (&x)[kPasses][kChunks], const float* mean, int first, int tokens) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    asm volatile("" ::: "memory");  // the mean is read again
    keep(x[pass]);
    float y[kChunks][8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      unpack<Source>(y[c], x[pass][c]);
      if constexpr (kSmooth) {
        const float4* from = reinterpret_cast<const float4*>(mean + 8 * (lane + kLanes * c));
        const float4 low = from[0], high = from[1];
        const float m[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) y[c][j] = __fsub_rn(y[c][j], m[j]);
      }
    }
    if constexpr (kRotate) rotate<kLanes>(y);
    const bool inside = first + pass * (kThreads / kLanes) < tokens;  // zeros less a mean are none
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      x[pass][c] = uint4{inside ? bf16x2(y[c][0], y[c][1]) : 0, inside ? bf16x2(y[c][2], y[c][3]) : 0,
                         inside ? bf16x2(y[c][4], y[c][5]) : 0, inside ? bf16x2(y[c][6], y[c][7]) : 0};
    }
    keep(x[pass]);
  }
}

// The rows of a block of Q or K that starts at row `base`, of the source type, become what is quantised, in bf16. Rows
// past the last token stay zeros.
template <class Source, int kLanes, int kPasses, int kChunks, int kHeadDim>
__device__ __forceinline__ void transform(uint4 (&x)[kPasses][kChunks], float (&mean)[kHeadDim], float* stage,
                                          const PackParams& p, const Block& block, int base) {
  const PackOperand& o = p.operand[block.operand];
  const int first = base + threadIdx.x / kLanes;
  if (block.operand != kPackK || p.k_mean == nullptr) {
    transform_rows<Source, false, true, kLanes>(x, mean, first, o.tokens);
    return;
  }
  key_mean<Source, kLanes, kChunks>(mean, p.k_mean, o, block, p.head_dim, stage);
  if (p.hadamard) {
    transform_rows<Source, true, true, kLanes>(x, mean, first, o.tokens);
  } else {
    transform_rows<Source, true, false, kLanes>(x, mean, first, o.tokens);
  }
}

}  // namespace fp8cutlass::packing
