// Cuts the work of a decode call into equal shares, one for each CTA. All units lie on a line, one after the other,
// each as long as what it costs. CTA c works from position c / ctas of the line on. A cut inside a unit falls between
// two tiles. Cuts depend on lengths alone, so that equal calls give equal bits.
//
// Where all units have as many tiles, a few CTAs may stay without work, so that the others have whole units each, or
// equal parts of one. Memory is as busy, and fewer units are shared. If a CTA then has several whole units, CTA c takes
// units c, c + ctas and so on: CTAs read all heads of a token at a time, which lie side by side in most caches. Not of
// short units: each of another sequence takes longer to find than what it gains.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/sums.cuh"
#include "fp8cutlass/decode/units.h"

namespace fp8cutlass::decode {

template <typename Int>
FP8_HOST_DEVICE Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

// What a cut depends on beside the sequence.
struct Line {
  int64_t length;
  int ctas, overhead;  // that share it; what a unit costs beside its tiles
};

// The cut at position `at` of the line, in a sequence that begins at `begin`, each of whose units costs `cost`.
template <typename Int>
FP8_HOST_DEVICE Cut cut_at(const CutParams& p, const Range& queries, const Line& whole, Int at, int sequence, Int begin,
                           Int cost) {
  const Int ctas = Int(whole.ctas), line = Int(whole.length);
  Cut cut{};
  cut.sequence = sequence, cut.of = sequence_at(p.batch, sequence);
  cut.begin = queries.begin, cut.end = queries.end;
  cut.unit = int((at - begin) / cost);
  const Int unit = begin + Int(cut.unit) * cost, overhead = Int(whole.overhead), within = at - unit;
  if (p.whole || within <= overhead) return cut;  // it begins there
  cut.tile = int(within - overhead);
  // Cut k is at line * k / ctas, rounded down. These are the first and last k in this unit's tiles.
  cut.first = int(ceil_div((unit + overhead + 1) * ctas, line)) - 1;
  cut.last = int(ceil_div((unit + cost) * ctas, line)) - 1;
  return cut;
}

// Makes all cuts of a line, whose products with the number of CTAs fit in an Int.
template <typename Int, typename Sum, typename Length>
__device__ __forceinline__ void cut_line(const CutParams& p, const Range& queries, const Line& whole, int64_t* begins,
                                         int64_t* costs, const Sum& sum_before, const Length& length_of) {
  const int thread = threadIdx.x;
  const Int line = Int(whole.length), ctas = Int(whole.ctas);
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
      p.cuts[c] = cut_at<Int>(p, queries, whole, at, base + s, Int(begins[s]), Int(costs[s]));
    }
    passed += all;
    __syncthreads();  // before the next ones' sums
  }
}

constexpr int kShort = 4;  // tiles of a unit that is short

// The most CTAs, of `ctas`, that so many equal units or parts of units go round in; 0 where more than one in 16 would
// stay without work. Short units are whole where they keep three SMs in eight busy: parts would cost more to put
// together than they save. All lanes of a warp take part.
__device__ __forceinline__ int even_ctas(int units, int tiles, int ctas) {
  if (tiles <= kShort && units <= ctas && 8 * units >= 3 * ctas) return units;
  const int lane = threadIdx.x % 32, own = ctas - lane;
  const bool goes = own > 0 && lane <= ctas / 16 && (units % own == 0 || own % units == 0);
  const unsigned found = __ballot_sync(~0u, goes);
  return found == 0 ? 0 : ctas - (__ffs(int(found)) - 1);
}

// One CTA of kCutThreads. `memory` is kCutBytes of shared memory.
__device__ __forceinline__ void cut_work(const CutParams& p, int64_t* memory) {
  int64_t *const begins = memory, *const costs = begins + kCutThreads, *const sums = costs + kCutThreads;
  wait_for_operands();
  dependents_may_begin();  // they wait for the cuts
  const int thread = threadIdx.x;
  const auto sum_before = [&](int64_t x, int64_t& total) { return decode::sum_before<kCutThreads>(x, sums, total); };
  Line line{0, p.ctas, p.overhead};
  const auto tiles_and_units = [&](int s, int& tiles) {
    const Sequence of = sequence_at(p.batch, s);
    tiles = tiles_of(p.batch, of, p.tile).count;
    return units_of(p.batch, of, p.rows);
  };
  const auto length_of = [&](int s, int64_t& cost) {
    cost = 0;
    if (s >= p.batch.sequences) return int64_t{0};
    int tiles;
    const int units = tiles_and_units(s, tiles);
    cost = tiles + line.overhead;
    return cost * units;
  };

  const Range queries = queries_of(p.batch);
  constexpr int64_t kUneven = int64_t{1} << 40, kUnlike = int64_t{1} << 50;  // beside numbers of units
  int first;
  const int each = tiles_and_units(0, first);
  int64_t own = 0, units = 0, all;
  for (int s = thread; s < p.batch.sequences; s += kCutThreads) {
    int tiles;
    const int count = tiles_and_units(s, tiles);
    units += count, own += int64_t{count} * (tiles + p.overhead);
    if (count > 0 && tiles != first) units |= kUneven;
    if (count != each) units |= kUnlike;
  }
  sum_before(own, line.length), sum_before(units, all);
  int step = 0;
  if (const int64_t count = all & (kUnlike - 1); count > 0 && count < kUneven && first > 0) {
    const int even = even_ctas(int(count), first, p.ctas);
    if (even > 0 && count * first >= even) line = {count * first, even, 0};
    const int rounds = even > 0 ? int(count) / even : 0;
    const bool several = rounds > 1 && rounds <= kKnown && rounds * even == count;
    if (all == count && several && first > kShort && even % each == 0) step = even / each;
  }
  // At least one position of the line for each CTA that works, so that whoever shares a unit has a tile of it.
  line.ctas = int(min(int64_t{line.ctas}, line.length));
  for (int i = thread; i < p.ctas * kArrivals; i += kCutThreads) p.arrived[i] = 0;
  for (int c = line.ctas + thread; c <= p.ctas; c += kCutThreads)
    p.cuts[c] = Cut{p.batch.sequences, 0, 0, 0, 0, {}, queries.begin, queries.end, 0, 0};
  if (line.length == 0) return;
  if (step > 0) {
    for (int c = thread; c < line.ctas; c += kCutThreads) {
      const int s = c / each;
      p.cuts[c] = Cut{s, c - s * each, 0, 0, 0, sequence_at(p.batch, s), queries.begin, queries.end, step, 0};
    }
    return;
  }
  // A division of 64 bits takes five times as long as one of 32.
  if (line.length < (int64_t{1} << 31) / (p.ctas + 1)) {
    cut_line<unsigned>(p, queries, line, begins, costs, sum_before, length_of);
  } else {
    cut_line<int64_t>(p, queries, line, begins, costs, sum_before, length_of);
  }
}

}  // namespace fp8cutlass::decode
