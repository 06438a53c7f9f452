// The end of an item whose keys were split over the CTAs of a cluster: every CTA leaves its part in its shared memory,
// and merges the columns that are its own to store from all parts, read through distributed shared memory.
#pragma once

#include "fp8cutlass/sm90/cluster.cuh"
#include "fp8cutlass/softmax.cuh"

namespace fp8cutlass::sm90 {

// What one CTA leaves for the others, thread by thread.
template <int kBlocks, int kThreads>
struct Part {
  float4 o[kBlocks][kThreads];
  float4 state[2][kThreads];  // of rows 0 and 1 of a lane: reference, sum, exact sum
};

// `o`, `ref`, `sum` and `exact` of the whole item, of `o` the 32-column groups g with g % kSplit == rank. Every
// consumer thread of every CTA of the cluster calls it, when nobody in its CTA reads the memory under `part` any more.
// A CTA that had no tile brings sum 0 and reference kDeadWeight.
template <int kSplit, int kBlocks, int kThreads>
__device__ __forceinline__ void merge(float (&o)[kBlocks][4], float (&ref)[2], float (&sum)[2], float2& exact,
                                      Part<kBlocks, kThreads>& part, int rank, int thread) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) part.o[n][thread] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
#pragma unroll
  for (int r = 0; r < 2; ++r) part.state[r][thread] = make_float4(ref[r], sum[r], r == 0 ? exact.x : exact.y, 0.f);
  cluster_sync();
  // One part after the other: all at once would not fit the registers beside O.
  float top[2] = {kDeadWeight, kDeadWeight};
#pragma unroll 1
  for (int from = 0; from < kSplit; ++from)
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], load_from(part.state[r][thread], from).x);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] = 0.f;
  float exact_sum[2] = {};
  sum[0] = sum[1] = 0.f;
#pragma unroll 1
  for (int from = 0; from < kSplit; ++from) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 state = load_from(part.state[r][thread], from);
      factor[r] = exp2_approx(state.x - top[r]);
      sum[r] = fmaf(factor[r], state.y, sum[r]);
      exact_sum[r] = fmaf(factor[r], state.z, exact_sum[r]);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (n / 4 % kSplit != rank) continue;
      const float4 x = load_from(part.o[n][thread], from);
      o[n][0] = fmaf(factor[0], x.x, o[n][0]), o[n][1] = fmaf(factor[0], x.y, o[n][1]);
      o[n][2] = fmaf(factor[1], x.z, o[n][2]), o[n][3] = fmaf(factor[1], x.w, o[n][3]);
    }
  }
  ref[0] = top[0], ref[1] = top[1];
  exact = make_float2(exact_sum[0], exact_sum[1]);
  cluster_sync();  // nobody leaves while others read its memory
}

}  // namespace fp8cutlass::sm90
