// The units of work of a decode call: some rows of a sequence that share a head of K and V, with the tiles of keys that
// the sequence's queries see. Rows are pairs of a query and a head of the group. Lengths are not trusted: whatever they
// are, a unit lies inside the tensors.
#pragma once

#include "fp8cutlass/decode/params.h"
#include "fp8cutlass/host_device.h"

namespace fp8cutlass::decode {

FP8_HOST_DEVICE int clamped(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

FP8_HOST_DEVICE int quotient(int x, const Divisor& d) { return int(uint64_t(unsigned(x)) * d.factor >> d.shift); }

// So many steps. Steps of tensors fit in 32 bits, which is one instruction.
FP8_HOST_DEVICE int64_t steps(int count, int64_t step) { return int64_t(uint64_t(unsigned(count)) * unsigned(step)); }

FP8_HOST_DEVICE Sequence sequence_of(const Batch& b, int length, int begin, int end) {
  Sequence of;
  of.keys = clamped(length, 0, b.most_keys);
  of.query = clamped(begin, 0, b.total_q);
  of.queries = b.routed && length < 0 ? 0 : clamped(end, of.query, b.total_q) - of.query;
  return of;
}

// Where the queries of a sequence begin, or end where it is the one before.
FP8_HOST_DEVICE int query_at(const Batch& b, int s) { return b.cu_q == nullptr ? s * b.each : b.cu_q[s]; }

FP8_HOST_DEVICE Sequence sequence_at(const Batch& b, int s) {
  return sequence_of(b, b.lengths[s], query_at(b, s), query_at(b, s + 1));
}

struct Range {
  int begin, end;
};

// The queries that belong to a sequence.
FP8_HOST_DEVICE Range queries_of(const Batch& b) {
  const int begin = clamped(query_at(b, 0), 0, b.total_q);
  return {begin, clamped(query_at(b, b.sequences), begin, b.total_q)};
}

// Keys from `first` on, before `end`.
struct Keys {
  int first, end;
};

// What query number `query` of a sequence sees. The last query stands at the last key.
FP8_HOST_DEVICE Keys seen_by(const Batch& b, const Sequence& of, int query) {
  const int own = of.keys - of.queries + query;
  return {b.left >= kFar ? 0 : clamped(own - b.left, 0, of.keys),
          b.right >= kFar ? of.keys : clamped(own + b.right + 1, 0, of.keys)};
}

// Tiles of keys, of all that a sequence's queries see: `first` counts from the sequence's first key.
struct Tiles {
  int first, count;
};

FP8_HOST_DEVICE Tiles tiles_of(const Batch& b, const Sequence& of, int tile) {
  if (of.queries == 0) return {0, 0};
  const int first = seen_by(b, of, 0).first / tile, end = seen_by(b, of, of.queries - 1).end;
  const int past = end / tile + (end % tile != 0);
  return {first, past > first ? past - first : 0};
}

// Units of a sequence: every head of K and V has the same row tiles, and number `row_tile * kv_heads + head`.
FP8_HOST_DEVICE int units_of(const Batch& b, const Sequence& of, int rows) {
  return (of.queries * b.by_group.by + rows - 1) / rows * b.kv_heads;
}

}  // namespace fp8cutlass::decode
