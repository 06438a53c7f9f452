// What a CTA works on, unit after unit, and the slices of keys in it that one of its warps takes. A warp has two
// streams: one says what it loads, the other, some slices behind, what it computes.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/units.h"

namespace fp8cutlass::decode {

// The lengths of the sequences that a CTA works on, in shared memory: a load from global memory would come behind all
// copies of keys that are on their way.
struct Lengths {
  int keys[kKnown], query[kKnown], end[kKnown];  // one for each lane
};

class Sequences {
 public:
  // Asks for the lengths of the first sequence and those after it, `from.step` apart.
  __device__ __forceinline__ Sequences(const Batch& b, const Cut& from, Lengths& lengths)
      : lengths_(lengths), first_(from.sequence), step_(from.step) {
    const int lane = threadIdx.x % 32, s = min(first_ + lane * max(step_, 1), b.sequences - 1);
    copy4(&lengths.keys[lane], b.lengths + s, 4);
    if (b.cu_q == nullptr) return;
    copy4(&lengths.query[lane], b.cu_q + s, 4), copy4(&lengths.end[lane], b.cu_q + s + 1, 4);
  }

  __device__ __forceinline__ void are_there() { there_ = true; }

  __device__ __forceinline__ Sequence at(const Batch& b, int s) const {
    const int i = step_ > 1 ? (s - first_) / step_ : s - first_;
    if (!there_ || i >= kKnown) return sequence_at(b, s);
    const bool equal = b.cu_q == nullptr;
    return sequence_of(b, lengths_.keys[i], equal ? s * b.each : lengths_.query[i],
                       equal ? (s + 1) * b.each : lengths_.end[i]);
  }

 private:
  const Lengths& lengths_;
  int first_, step_;
  bool there_ = false;
};

// The share of a unit that a CTA works on.
struct Share {
  Sequence of;
  int sequence, kv_head;
  int row;        // the first row of the unit, of the sequence's rows of this head
  int first_key;  // of the first tile
  Keys seen;      // by any row of the unit
  int tiles;      // of the share; 0 where none of its keys is seen by one of its rows
  int tile, end;  // the share goes from one tile of the unit to another, `tiles_of` counts them
  int all;        // tiles of the unit
};

// The shares of a CTA, in their order.
template <int kRows, int kTile>
struct Shares {
  struct Place {
    int sequence, unit, tile;
  };

  Place begin, last;  // where the next share begins, and where the last one ends
  int step;

  __device__ __forceinline__ Shares(const Cut& from, const Cut& to)
      : begin{from.sequence, from.unit, from.tile},
        last{from.step > 0 ? kFar : to.sequence, to.unit, to.tile},
        step(from.step) {}

  // What `next` begins with.
  __device__ __forceinline__ static Share before(const Cut& from) {
    Share share{};
    share.sequence = from.sequence, share.of = from.of;
    return share;
  }

  // The next one; false where there is none. `sequences.at` knows the lengths.
  template <class Lengths>
  __device__ __forceinline__ bool next(const Batch& b, const Lengths& sequences, Share& share) {
    for (; begin.sequence < b.sequences; ++begin.sequence, begin.unit = 0) {  // those without units are passed
      const bool ends = begin.sequence == last.sequence && begin.unit == last.unit;
      if (begin.sequence > last.sequence || (ends && begin.tile >= last.tile)) return false;
      if (share.sequence != begin.sequence) share.of = sequences.at(b, begin.sequence), share.sequence = begin.sequence;
      if (begin.unit >= units_of(b, share.of, kRows)) continue;
      find(b, share, ends ? last.tile : kFar);
      if (ends) {
        begin.tile = last.tile;
      } else if (step > 0) {
        begin.sequence += step;
      } else {
        ++begin.unit, begin.tile = 0;
      }
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ void find(const Batch& b, Share& share, int until) const {
    const int row_tile = quotient(begin.unit, b.by_kv_heads), rows = share.of.queries * b.by_group.by;
    const Tiles tiles = tiles_of(b, share.of, kTile);
    share.kv_head = begin.unit - row_tile * b.kv_heads;
    share.row = row_tile * kRows;
    share.tile = begin.tile, share.all = tiles.count;
    share.end = until < tiles.count ? until : tiles.count;
    // Of these tiles, those that the rows of this unit see.
    const int past = share.row + kRows < rows ? share.row + kRows : rows;
    share.seen = {seen_by(b, share.of, quotient(share.row, b.by_group)).first,
                  seen_by(b, share.of, quotient(past - 1, b.by_group)).end};
    const int first = max(tiles.first + share.tile, share.seen.first / kTile);
    const int end = min(tiles.first + share.end, (share.seen.end + kTile - 1) / kTile);
    share.first_key = first * kTile;
    share.tiles = max(end - first, 0);
  }
};

}  // namespace fp8cutlass::decode
