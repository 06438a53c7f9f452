// What a CTA works on, unit after unit, and the slices of keys in it that one of its warps takes. A warp has two
// streams: one says what it loads, the other, some slices behind, what it computes.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/units.h"

namespace fp8cutlass::decode {

// The lengths of the sequences that a CTA works on, in shared memory: a load from global memory would come behind all
// copies of keys that are on their way.
struct Lengths {
  static constexpr int kKnown = 32;  // one for each lane
  int keys[kKnown], query[kKnown + 1];
};

class Sequences {
 public:
  // Asks for the lengths of sequence `first` and those after it.
  __device__ __forceinline__ Sequences(const Batch& b, int first, Lengths& lengths) : lengths_(lengths), first_(first) {
    const int lane = threadIdx.x % 32;
    copy4(&lengths.keys[lane], b.lengths + min(first + lane, b.sequences - 1), 4);
    if (b.cu_q == nullptr) return;
    copy4(&lengths.query[lane], b.cu_q + min(first + lane, b.sequences), 4);
    if (lane == 0) copy4(&lengths.query[kKnown], b.cu_q + min(first + kKnown, b.sequences), 4);
  }

  __device__ __forceinline__ void are_there() { there_ = true; }

  __device__ __forceinline__ Sequence at(const Batch& b, int s) const {
    const int i = s - first_;
    if (!there_ || i >= kKnown) return sequence_at(b, s);
    const bool equal = b.cu_q == nullptr;
    return sequence_of(b, lengths_.keys[i], equal ? s * b.each : lengths_.query[i],
                       equal ? (s + 1) * b.each : lengths_.query[i + 1]);
  }

 private:
  static constexpr int kKnown = Lengths::kKnown;

  const Lengths& lengths_;
  int first_;
  bool there_ = false;
};

// The share of a unit that a CTA works on.
struct Share {
  Sequence of;
  int sequence, kv_head;
  int row;              // the first row of the unit, of the sequence's rows of this head
  int first_key;        // of the first tile
  Keys seen;            // by any row of the unit
  int tiles;            // of the share; 0 where none of its keys is seen by one of its rows
  int unit, tile, end;  // the share goes from one tile of the unit to another, `tiles_of` counts them
  int all;              // tiles of the unit
};

// The shares of a CTA, in their order.
template <int kRows, int kTile>
struct Shares {
  int sequence, unit, tile;  // where the next share begins
  int last_sequence, last_unit, last_tile;

  __device__ __forceinline__ Shares(const Cut& from, const Cut& to)
      : sequence(from.sequence),
        unit(from.unit),
        tile(from.tile),
        last_sequence(to.sequence),
        last_unit(to.unit),
        last_tile(to.tile) {}

  // What `next` begins with.
  __device__ __forceinline__ static Share before(const Cut& from) {
    Share share{};
    share.sequence = from.sequence, share.of = from.of;
    return share;
  }

  // The next one; false where there is none. `sequences.at` knows the lengths.
  template <class Lengths>
  __device__ __forceinline__ bool next(const Batch& b, const Lengths& sequences, Share& share) {
    for (; sequence < b.sequences; ++sequence, unit = 0) {  // those without units are passed
      const bool last = sequence == last_sequence && unit == last_unit;
      if (sequence > last_sequence || (last && tile >= last_tile)) return false;
      if (share.sequence != sequence) share.of = sequences.at(b, sequence), share.sequence = sequence;
      if (unit >= units_of(b, share.of, kRows)) continue;
      find(b, share, last ? last_tile : kFar);
      if (last) {
        tile = last_tile;
      } else {
        ++unit, tile = 0;
      }
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ void find(const Batch& b, Share& share, int until) const {
    const int row_tile = quotient(unit, b.by_kv_heads), rows = share.of.queries * b.by_group.by;
    const Tiles tiles = tiles_of(b, share.of, kTile);
    share.kv_head = unit - row_tile * b.kv_heads;
    share.row = row_tile * kRows;
    share.unit = unit, share.tile = tile, share.all = tiles.count;
    share.end = until < tiles.count ? until : tiles.count;
    // Of these tiles, those that the rows of this unit see.
    const int past = share.row + kRows < rows ? share.row + kRows : rows;
    share.seen = {seen_by(b, share.of, quotient(share.row, b.by_group)).first,
                  seen_by(b, share.of, quotient(past - 1, b.by_group)).end};
    const int begin = max(tiles.first + share.tile, share.seen.first / kTile);
    const int end = min(tiles.first + share.end, (share.seen.end + kTile - 1) / kTile);
    share.first_key = begin * kTile;
    share.tiles = max(end - begin, 0);
  }
};

}  // namespace fp8cutlass::decode
