// Merges the results of attention over two parts of the keys into one: what python/fp8cutlass/api/merge.py does by
// torch operations. A warp has rows of its own, so that it has read their LSEs before it writes them.
#pragma once

#include <cmath>

#include "fp8cutlass/merge/params.h"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::merging {

__device__ __forceinline__ float4 partial_at(const MergeParams& p, int64_t at) {
  if (p.kind == Partial::f32) return *reinterpret_cast<const float4*>(static_cast<const float*>(p.to) + at);
  const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.to) + at);
  if (p.kind == Partial::fp16)
    return make_float4(half_low(pairs.x), half_high(pairs.x), half_low(pairs.y), half_high(pairs.y));
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };  // of two bf16
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  return make_float4(low(pairs.x), high(pairs.x), low(pairs.y), high(pairs.y));
}

// torch.logaddexp. NaN comes through the exponential.
__device__ __forceinline__ float log_sum(float a, float b) {
  return a == b && fabsf(a) == INFINITY ? a : fmaxf(a, b) + log1pf(expf(-fabsf(a - b)));
}

// torch.lerp.
__device__ __forceinline__ float between(float a, float b, float weight) {
  return fabsf(weight) < 0.5f ? fmaf(weight, b - a, a) : fmaf(weight - 1.f, b - a, b);
}

__device__ __forceinline__ void merge_rows(const MergeParams& p) {
  const unsigned lane = threadIdx.x % p.lanes, row = blockIdx.x * (kMergeThreads / p.lanes) + threadIdx.x / p.lanes;
  const bool there = row < p.rows;
  int64_t out = 0, lse = 0, to = 0;
  float weight = 0.f, total = 0.f;
  if (there) {
    const unsigned outer = row / p.size[1];
    const unsigned place[3] = {outer / p.size[0], outer % p.size[0], row % p.size[1]};
    int64_t to_lse = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      out += place[i] * p.out_stride[i], lse += place[i] * p.lse_stride[i];
      to += place[i] * p.to_stride[i], to_lse += place[i] * p.to_lse_stride[i];
    }
    const float a = p.lse[lse], b = p.to_lse[to_lse];
    total = log_sum(a, b);
    weight = total == -INFINITY ? 0.f : expf(b - total);
  }
  __syncwarp();  // the LSEs of all rows of the warp have been read
  if (!there) return;
  if (lane == 0) p.lse[lse] = total;
  for (unsigned column = kColumns * lane; column < p.columns; column += kColumns * p.lanes) {
    float4* const place = reinterpret_cast<float4*>(p.out + out + column);
    const float4 a = *place, b = partial_at(p, to + column);
    *place = make_float4(between(a.x, b.x, weight), between(a.y, b.y, weight), between(a.z, b.z, weight),
                         between(a.w, b.w, weight));
  }
}

}  // namespace fp8cutlass::merging
