// What happens to a block of Q or K between its load and its quantisation where keys are smoothed or rows rotated:
// python/fp8cutlass/smooth.py, rotate.py and prepare.py, bit for bit.
//
// A row is transformed in float32 by the lanes that hold it and goes back into their registers as bf16. Butterflies of
// elements of one chunk and of a lane's chunks take no exchange. Those between lanes take one shuffle for two elements:
// 1 stage at head_dim 32, 2 at 64 and 96, 3 at 128 and 192, 4 at 256; and when all is quantised, one for 8 puts the
// bytes in order. Each block is transformed once.
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

// Four floats of shared memory, which the compiler is not to keep in registers from one row to the next.
__device__ __forceinline__ float4 read_again(const float* from) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared_address(from))
               : "memory");
  return x;
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
                                         int head_dim, bool rotated, float* stage) {
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
    const float finite = fabsf(m) <= FLT_MAX ? m : 0.f;
    mean[threadIdx.x] = rotated && kSigns[threadIdx.x / 32] >> threadIdx.x % 32 & 1 ? -finite : finite;
    if (block.index == 0) out[int64_t{block.head} * kHeadDim + threadIdx.x] = finite;
  }
  __syncthreads();
}

// ---- the rotation ---------------------------------------------------------------------------------------------------

// The signs of word j of a chunk, two columns, are bits 15 and 31 of this << 15 - 2 * j.
__device__ __forceinline__ uint32_t chunk_signs(int chunk) {
  const uint32_t signs = kSigns[chunk / 4] >> 8 * (chunk % 4) & 0xff;
  return signs | signs << 15;
}

__device__ __forceinline__ void apply_signs(uint4& x, uint32_t signs) {
  constexpr uint32_t kBoth = 0x80008000;
  x.x ^= signs << 15 & kBoth, x.y ^= signs << 13 & kBoth, x.z ^= signs << 11 & kBoth, x.w ^= signs << 9 & kBoth;
}

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

// -1 where this bit of the lane is set; a product with it is exact.
template <int kLanes>
__device__ __forceinline__ float side(int bit) {
  return threadIdx.x % kLanes & bit ? -1.f : 1.f;
}

// `lower` becomes the sum of itself and `other` and `upper` the difference; the other way round where `turn` is -1.
__device__ __forceinline__ void butterfly(float& lower, float& upper, float other, float turn) {
  const float own = lower;
  lower = __fmaf_rn(turn, other, own), upper = __fmaf_rn(-turn, other, own);
}

// A row whose chunks lie in kLanes lanes, in place, after apply_signs. All lanes of the warp must come here. Two chunks
// belong to one transform, three to three of their own.
//
// A lane has both elements of each pair that it adds: before a stage between lanes l and l ^ step it gives its partner
// the upper half of y[c] and gets the partner's. The butterfly before that one took care of what lies there: of bit 2
// of the column, or 3, 4, ... of later stages, a lane kept in its lower half the elements in which it equals its own
// bit `step`. The elements of the two bits change places, so a stage costs a shuffle for two elements and no selection.
//
// Nor does a lane look which element of a pair was the first: where its bit `step` is set, it has the difference with
// the wrong sign. All elements of a half then share that sign, and so does what later comes from its partners; the
// scale puts it right. Only a zero has lost its own sign, and is made positive.
//
// In the end the lower half is columns 0..3 of a chunk in even lanes and 4..7 in odd ones, the upper half the same
// columns of the chunk of the neighbour: exchange_halves and rotated_lane.
template <int kLanes, int kChunks>
__device__ __forceinline__ void rotate(float (&y)[kChunks][8]) {
  static_assert(kChunks == 2 || kChunks == 3);
  constexpr int kLast = kLanes / 2;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if ((j & apart) == 0) butterfly(y[c][j], y[c][j + apart]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) butterfly(y[c][j], y[c][j + 4], y[c][j + 4], side<kLanes>(1));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float turn = side<kLanes>(step == kLast ? 1 : 2 * step);
#pragma unroll
      for (int j = 0; j < 4; ++j) butterfly(y[c][j], y[c][j + 4], __shfl_xor_sync(~0u, y[c][j + 4], step), turn);
    }
    keep(y[c]);
  }
  if constexpr (kChunks == 2) {
#pragma unroll
    for (int j = 0; j < 8; ++j) butterfly(y[0][j], y[1][j]);
  }
  // A half got a wrong sign at each stage whose bit is set in the lane if it was the difference: that is in the lower
  // half, which went on, where the bit of the next stage is set too, and after the last stage in one half or the other.
  constexpr float kScale = inverse_root(8 * kLanes * (kChunks == 2 ? 2 : 1));
  const int lane = threadIdx.x % kLanes;
  const float scale = __popc(lane & lane >> 1) % 2 ? -kScale : kScale;
  const float lower = lane & kLast && lane & 1 ? -scale : scale, upper = lane & kLast && !(lane & 1) ? -scale : scale;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) y[c][j] = __fmaf_rn(y[c][j], j < 4 ? lower : upper, 0.f);
  }
}

// Of a lane's chunks after `rotate`: the lane that a load would give them to.
template <int kLanes>
__device__ __forceinline__ int rotated_lane(int lane) {
  return lane / 2 + lane % 2 * (kLanes / 2);
}

// The chunk of which this lane holds the one half and its neighbour the other. All lanes of the warp must come here.
__device__ __forceinline__ uint2 exchange_halves(const uint2& bytes) {
  const uint32_t other = __shfl_xor_sync(~0u, bytes.y, 1);
  return threadIdx.x % 2 == 0 ? uint2{bytes.x, other} : uint2{other, bytes.x};
}

// ---- a block --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool transforms(const PackParams& p, const Block& block) {
  return block.operand == kPackK ? p.k_mean != nullptr || p.hadamard : block.operand == kPackQ && p.hadamard;
}

// Row after row, and none of those behind the last token, which are zeros: the branch keeps the compiler from taking
// several rows at once, which costs registers, and makes each wait for the loads of all.
template <class Source, bool kSmooth, bool kRotate, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void transform_rows(uint4 (&x)[kPasses][kChunks], const float* mean, int base, int tokens) {
  const int lane = threadIdx.x % kLanes, first = base + threadIdx.x / kLanes;
  uint32_t signs[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) signs[c] = chunk_signs(lane + kLanes * c);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (base + pass * (kThreads / kLanes) >= tokens) break;
    keep(x[pass]);
    float y[kChunks][8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (kRotate) apply_signs(x[pass][c], signs[c]);  // those of the mean are applied already
      unpack<Source>(y[c], x[pass][c]);
      if constexpr (kSmooth) {
        const float* from = mean + 8 * (lane + kLanes * c);
        const float4 low = read_again(from), high = read_again(from + 4);
        const float m[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) y[c][j] = __fsub_rn(y[c][j], m[j]);
      }
    }
    if constexpr (kRotate) rotate<kLanes>(y);
    const bool inside = !kSmooth || first + pass * (kThreads / kLanes) < tokens;  // zeros less a mean are none
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
  if (block.operand != kPackK || p.k_mean == nullptr) {
    transform_rows<Source, false, true, kLanes>(x, mean, base, o.tokens);
    return;
  }
  key_mean<Source, kLanes, kChunks>(mean, p.k_mean, o, block, p.head_dim, p.hadamard, stage);
  if (p.hadamard) {
    transform_rows<Source, true, true, kLanes>(x, mean, base, o.tokens);
  } else {
    transform_rows<Source, true, false, kLanes>(x, mean, base, o.tokens);
  }
}

}  // namespace fp8cutlass::packing
