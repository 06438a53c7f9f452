// Where tokens go: from a list of slots, or from lengths and a page table. Nothing that these say is trusted: a place
// lies in the cache, or there is none.
#pragma once

#include "fp8cutlass/append/params.h"
#include "fp8cutlass/walk/lengths.cuh"

namespace fp8cutlass::appending {

struct Place {
  int page;      // -1: the token goes nowhere
  int offset;    // in the page
  int row;       // of given descales: the token, or its sequence
  int position;  // in the sequence
};

__device__ __forceinline__ int64_t number_at(const Numbers& x, int i) {
  return x.wide ? static_cast<const int64_t*>(x.base)[i] : int64_t{static_cast<const int*>(x.base)[i]};
}

__device__ __forceinline__ Place place_in_slots(const AppendParams& p, int token) {
  Place at{-1, 0, token, 0};
  const int64_t slot = number_at(p.slots, token);
  if (slot >= 0 && slot < int64_t{p.pages} * p.page_size) {
    at.page = int(unsigned(slot) / unsigned(p.page_size));
    at.offset = int(slot) - at.page * p.page_size;
  }
  if (p.half > 0) {
    const int64_t position = number_at(p.positions, token);
    at.position = int(min(max(position, int64_t{0}), int64_t{p.table_rows - 1}));
  }
  return at;
}

// All threads of a warp ask for one token.
__device__ __forceinline__ Place place_in_table(const AppendParams& p, int token) {
  const int s = last_begun(p.sequences, token, [&](int i) { return p.cu[i]; });
  Place at{-1, 0, s, 0};
  const int64_t position = int64_t{p.lengths[s]} + token - p.cu[s];
  const bool there = p.cu[s] <= token && token < p.cu[s + 1];
  if (!there || position < 0 || position >= int64_t{p.entries} * p.page_size) return at;
  const int column = int(unsigned(position) / unsigned(p.page_size));
  const int page = p.table[s * p.table_row + column];
  if (page < 0 || page >= p.pages) return at;
  at.page = page, at.offset = int(position) - column * p.page_size, at.position = int(position);
  return at;
}

__device__ __forceinline__ Place place_of(const AppendParams& p, int token) {
  return p.slots.base != nullptr ? place_in_slots(p, token) : place_in_table(p, token);
}

// Tokens from `token` on that go into one page, from `offset` on.
struct Run {
  int token, page, offset, count;
};

// Calls `f` with the runs of a batch, each from one of the CTA's threads: with all whose tokens are `from` to `end` -
// 1, and perhaps others.
template <class F>
__device__ __forceinline__ void each_run(const AppendParams& p, int from, int end, const F& f) {
  const int thread = threadIdx.x;
  if (p.slots.base != nullptr) {
#pragma unroll 2
    for (int i = from + thread; i < end; i += kAppendThreads) {
      const int64_t slot = number_at(p.slots, i);
      if (slot < 0 || slot >= int64_t{p.pages} * p.page_size) continue;
      const int page = int(unsigned(slot) / unsigned(p.page_size));
      f(Run{i, page, int(slot) - page * p.page_size, 1});
    }
    return;
  }
  for (int s = thread / p.width; s < p.sequences; s += kAppendThreads / p.width) {
    const int64_t begin = p.cu[s], least = max(begin, int64_t{0}), past = min(p.cu[s + 1], p.tokens);
    if (past <= max(least, int64_t{from}) || least >= end) continue;
    const int64_t before = int64_t{p.lengths[s]} - begin;  // a token's position less its number
    const int64_t begins = max(before + least, int64_t{0});
    const int stop = int(min(max(before + past, int64_t{0}), int64_t{p.entries} * p.page_size));
    if (begins >= stop) continue;
    const int first = int(begins);
#pragma unroll 1
    for (int column = first / p.page_size + thread % p.width; column * p.page_size < stop; column += p.width) {
      const int page = p.table[s * p.table_row + column];
      if (page < 0 || page >= p.pages) continue;
      const int base = column * p.page_size, at = max(first, base);
      f(Run{int(at - before), page, at - base, min(stop, base + p.page_size) - at});
    }
  }
}

}  // namespace fp8cutlass::appending
