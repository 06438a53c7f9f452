// Cuts the work of a decode call into equal shares, one for each CTA. All units lie on a line, one after the other,
// each as long as what it costs. CTA c works from position c / ctas of the line on. A cut inside a unit falls between
// two tiles. Cuts depend on lengths alone, so that equal calls give equal bits.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/sums.cuh"
#include "fp8cutlass/decode/units.h"

namespace fp8cutlass::decode {

template <typename Int>
CUTE_HOST_DEVICE Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

// The cut at position `at` of the line, in a sequence that begins at `begin`, each of whose units costs `cost`.
template <typename Int>
CUTE_HOST_DEVICE Cut cut_at(const CutParams& p, const Range& queries, Int ctas, Int line, Int at, int sequence,
                            Int begin, Int cost) {
  Cut cut{};
  cut.sequence = sequence, cut.of = sequence_at(p.batch, sequence);
  cut.begin = queries.begin, cut.end = queries.end;
  cut.unit = int((at - begin) / cost);
  const Int unit = begin + Int(cut.unit) * cost, overhead = Int(p.overhead), within = at - unit;
  if (p.whole || within <= overhead) return cut;  // it begins there
  cut.tile = int(within - overhead);
  // Cut k is at line * k / ctas, rounded down. These are the first and last k in this unit's tiles.
  cut.first = int(ceil_div((unit + overhead + 1) * ctas, line)) - 1;
  cut.last = int(ceil_div((unit + cost) * ctas, line)) - 1;
  return cut;
}

// Makes all cuts of a line, whose products with the number of CTAs fit in an Int.
template <typename Int, typename Sum, typename Length>
__device__ __forceinline__ void cut_line(const CutParams& p, const Range& queries, int used, int64_t whole_line,
                                         int64_t* begins, int64_t* costs, const Sum& sum_before,
                                         const Length& length_of) {
  const int thread = threadIdx.x;
  const Int line = Int(whole_line), ctas = Int(used);
  int64_t passed = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch.sequences; base += kCutThreads) {
    int64_t all, cost;
    const int64_t length = length_of(base + thread, cost), begin = passed + sum_before(length, all);
    begins[thread] = begin, costs[thread] = cost;
    __syncthreads();
    const Int past = ceil_div(Int(passed + all) * ctas, line);
    for (Int c = ceil_div(Int(passed) * ctas, line) + Int(thread); c < past; c += Int(kCutThreads)) {
      const Int at = line * c / ctas;
      int s = 0;  // the last sequence that begins there or before: those that have no unit begin where the next does
#pragma unroll
      for (int step = kCutThreads / 2; step > 0; step /= 2)
        if (begins[s + step] <= int64_t(at)) s += step;
      p.cuts[c] = cut_at<Int>(p, queries, ctas, line, at, base + s, Int(begins[s]), Int(costs[s]));
    }
    passed += all;
    __syncthreads();  // before the next ones' sums
  }
}

// One CTA of kCutThreads. `memory` is kCutBytes of shared memory.
__device__ __forceinline__ void cut_work(const CutParams& p, int64_t* memory) {
  int64_t *const begins = memory, *const costs = begins + kCutThreads, *const sums = costs + kCutThreads;
  dependents_may_begin();  // they wait for the cuts
  const int thread = threadIdx.x;
  const auto sum_before = [&](int64_t x, int64_t& total) { return decode::sum_before<kCutThreads>(x, sums, total); };
  const auto length_of = [&](int s, int64_t& cost) {
    cost = 0;
    if (s >= p.batch.sequences) return int64_t{0};
    const Sequence of = sequence_at(p.batch, s);
    cost = cost_of(tiles_of(p.batch, of, p.tile), p.overhead);
    return cost * units_of(p.batch, of, p.rows);
  };

  const Range queries = queries_of(p.batch);
  int64_t own = 0, cost, line;
  for (int s = thread; s < p.batch.sequences; s += kCutThreads) own += length_of(s, cost);
  sum_before(own, line);
  // At least one position of the line for each CTA that works, so that whoever shares a unit has a tile of it.
  const int ctas = int(min(int64_t{p.ctas}, line));
  for (int c = thread; c <= p.ctas; c += kCutThreads) {
    if (c < p.ctas) p.arrived[c] = 0;
    if (c >= ctas) p.cuts[c] = Cut{p.batch.sequences, 0, 0, 0, 0, {}, queries.begin, queries.end, {}};
  }
  if (line == 0) return;
  // A division of 64 bits takes five times as long as one of 32.
  if (line < (int64_t{1} << 31) / (p.ctas + 1)) {
    cut_line<unsigned>(p, queries, ctas, line, begins, costs, sum_before, length_of);
  } else {
    cut_line<int64_t>(p, queries, ctas, line, begins, costs, sum_before, length_of);
  }
}

}  // namespace fp8cutlass::decode
