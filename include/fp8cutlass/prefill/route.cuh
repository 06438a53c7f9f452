// Chooses the sequences of a call whose queries are many enough for the kernels of ragged batches, as long as their
// keys fit what they are copied to. All others are left to the kernels of decode. One CTA; only the device knows the
// lengths, which are not trusted (units.h). Where the ends of queries fall, no sequence is chosen: some would share
// rows.
#pragma once

#include "fp8cutlass/decode/sums.cuh"
#include "fp8cutlass/decode/units.h"
#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/prefill/params.h"

namespace fp8cutlass::prefill {

// One CTA of kRouteThreads. `memory` is kRouteBytes of shared memory.
__device__ __forceinline__ void choose_members(const RouteParams& p, int64_t* memory) {
  int64_t* const sums = memory;
  int* const taken = reinterpret_cast<int*>(sums + kRouteThreads / 32);  // members, their keys, whether ends fall
  const int thread = threadIdx.x, sequences = p.batch.sequences, most = p.members.most;
  if (thread < 3) taken[thread] = 0;
  __syncthreads();
  for (int s = thread; s < sequences; s += kRouteThreads)
    if (decode::query_at(p.batch, s + 1) < decode::query_at(p.batch, s)) taken[2] = 1;
  __syncthreads();
  delay_point(29);
  const bool rises = taken[2] == 0;
  int64_t members = 0, keys = 0;  // of the sequences before that have queries enough
#pragma unroll 1
  for (int base = 0; base < sequences; base += kRouteThreads) {
    const int s = base + thread;
    decode::Sequence of{};
    if (s < sequences) of = decode::sequence_at(p.batch, s);
    const bool wanted = rises && of.keys > 0 && of.queries >= p.least;
    int64_t all_members, all_keys;
    const int64_t rank = members + decode::sum_before<kRouteThreads>(wanted ? 1 : 0, sums, all_members);
    const int64_t begin = keys + decode::sum_before<kRouteThreads>(wanted ? of.keys : 0, sums, all_keys);
    members += all_members, keys += all_keys;
    // Both sums rise, so those that fit are the first ones.
    const bool fits = wanted && rank < most && begin + of.keys <= p.capacity;
    if (s < sequences) p.lengths[s] = fits ? -1 : of.keys;
    if (!fits) continue;
    const int i = int(rank);
    p.members.sequence[i] = s, p.members.first[i] = decode::seen_by(p.batch, of, 0).first;
    p.members.cu_q[i] = of.query, p.members.used_q[i] = of.queries, p.members.cu_k[i] = int(begin);
    atomicMax(&taken[0], i + 1), atomicMax(&taken[1], int(begin) + of.keys);
  }
  __syncthreads();
  delay_point(30);
  const int count = taken[0];
  if (thread == 0) *p.members.count = count;
  for (int i = count + thread; i <= most; i += kRouteThreads) {
    p.members.cu_q[i] = p.batch.total_q, p.members.cu_k[i] = taken[1];
    if (i < most) p.members.used_q[i] = 0, p.members.sequence[i] = -1, p.members.first[i] = 0;
  }
}

}  // namespace fp8cutlass::prefill
