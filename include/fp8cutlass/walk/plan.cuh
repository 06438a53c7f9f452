// Lists the row tiles of a ragged batch for the attention kernel, those of the sequences with most keys first, so that
// no long one is left for the end. Only the device knows the lengths, and they are not trusted (lengths.cuh): whatever
// they are, an entry stays inside the tensors, and the list inside its memory.
#pragma once

#include <cuda_runtime.h>

#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/walk/lengths.cuh"
#include "fp8cutlass/walk/plan_params.h"

namespace fp8cutlass::planning {

constexpr int kBuckets = kThreads;  // of sequences with about as many keys, the longest first
constexpr int kBucketKeys = 64;

struct Sequence {
  int query, rows, key, keys;
};

__device__ __forceinline__ Sequence sequence_at(const PlanParams& p, int s) {
  const Span rows = rows_at(p.batch, p.total_q, s), keys = keys_at(p.batch, s);
  return {rows.first, rows.count, keys.first, keys.count};
}

__device__ __forceinline__ int tiles_of(const PlanParams& p, const Sequence& s) {
  return s.rows / p.tile_m + (s.rows % p.tile_m != 0);
}

__device__ __forceinline__ int bucket_of(const Sequence& s) {
  return kBuckets - 1 - min(s.keys / kBucketKeys, kBuckets - 1);
}

// Sums over the threads before this one; `total` is that of all threads. Every thread of the CTA comes here.
__device__ __forceinline__ int64_t sum_before(int64_t x, int64_t (&of_warp)[kThreads / 32], int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  delay_point(18);
  int64_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  return before + sum - x;
}

// The row tiles of sequence `number`, from place `first` of the list on. All lanes of a warp come here.
__device__ __forceinline__ void list_tiles(const PlanParams& p, int number, const Sequence& sequence, int first) {
  const int tiles = tiles_of(p, sequence);
  RowTile entry{};
  entry.sequence = number;
  entry.rows = sequence.rows, entry.keys = sequence.keys;
  entry.query = sequence.query, entry.key = sequence.key;
  entry.block = block_at(entry.key, entry.sequence, p.key_block);
  if (p.batch.keys_in_blocks) entry.key = entry.block * p.key_block;
  for (int t = threadIdx.x % 32; t < tiles && t < p.batch.most - first; t += 32) {
    entry.row = (tiles - 1 - t) * p.tile_m;  // from the last rows on, which see most keys
    p.batch.tiles[first + t] = entry;
  }
}

// Of so few sequences that a warp has a lane for each. Every warp finds the places of all and lists one, so that none
// waits for another. Of a bucket they come in their order.
__device__ __forceinline__ void plan_few(const PlanParams& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= p.batch.sequences) return;
  Sequence own{};
  if (lane < p.batch.sequences) own = sequence_at(p, lane);
  // More than the list holds is as good as that: a sum of 32 cannot overflow then.
  const int tiles = min(tiles_of(p, own), p.batch.most), bucket = bucket_of(own);
  int before = 0, total = 0;
  for (int s = 0; s < p.batch.sequences; ++s) {
    const int other = __shfl_sync(~0u, tiles, s), of = __shfl_sync(~0u, bucket, s);
    total += other;
    if (of < bucket || (of == bucket && s < lane)) before += other;
  }
  if (threadIdx.x == 0) *p.batch.count = min(total, p.batch.most);
  const Sequence sequence{__shfl_sync(~0u, own.query, warp), __shfl_sync(~0u, own.rows, warp),
                          __shfl_sync(~0u, own.key, warp), __shfl_sync(~0u, own.keys, warp)};
  list_tiles(p, warp, sequence, min(__shfl_sync(~0u, before, warp), p.batch.most));
}

// One CTA of kThreads. It reads nothing that the kernel before it writes, and may run beside that one, but ends after
// it: who waits for this one waits for both. The attention kernel waits for it, so that what counts is how long one
// load after the other takes: lengths are read once, and all warps list.
__global__ void __launch_bounds__(kThreads) plan(const __grid_constant__ PlanParams p) {
  using Count = unsigned long long;  // lengths that overlap may ask for any number
  __shared__ Count place[kBuckets];  // tiles of a bucket, then where its next one goes
  __shared__ int64_t of_warp[kThreads / 32];
  __shared__ Sequence sequences[kThreads];
  __shared__ int first[kThreads];  // of a sequence's tiles, its place in the list
  dependents_may_begin();          // they wait for the list
  if (p.batch.sequences <= 32) {
    plan_few(p);
    wait_for_operands();
    return;
  }
  Sequence own{};
  if (int(threadIdx.x) < p.batch.sequences) own = sequence_at(p, threadIdx.x);
  place[threadIdx.x] = 0;
  __syncthreads();
  const auto count = [&](const Sequence& sequence) {
    const int tiles = tiles_of(p, sequence);
    if (tiles > 0) atomicAdd(&place[bucket_of(sequence)], Count(tiles));
  };
  count(own);
  for (int s = threadIdx.x + kThreads; s < p.batch.sequences; s += kThreads) count(sequence_at(p, s));
  __syncthreads();
  int64_t total;
  const int64_t begin = sum_before(int64_t(min(place[threadIdx.x], Count(p.batch.most))), of_warp, total);
  place[threadIdx.x] = Count(begin);
  if (threadIdx.x == 0) *p.batch.count = int(min(total, int64_t(p.batch.most)));
  // A thread looks up a sequence, then a warp lists the tiles of one after the other.
  const int warp = threadIdx.x / 32;
  for (int base = 0; base < p.batch.sequences; base += kThreads) {
    const int number = base + threadIdx.x;
    if (base > 0 && number < p.batch.sequences) own = sequence_at(p, number);
    __syncthreads();  // places are known; the sequences before these are listed
    delay_point(19);
    const int own_tiles = number < p.batch.sequences ? tiles_of(p, own) : 0;
    sequences[threadIdx.x] = own;
    if (own_tiles > 0)
      first[threadIdx.x] = int(min(atomicAdd(&place[bucket_of(own)], Count(own_tiles)), Count(p.batch.most)));
    __syncthreads();
    const int end = min(kThreads, p.batch.sequences - base);
    for (int i = warp; i < end; i += kThreads / 32) list_tiles(p, base + i, sequences[i], first[i]);
  }
  wait_for_operands();
}

}  // namespace fp8cutlass::planning
