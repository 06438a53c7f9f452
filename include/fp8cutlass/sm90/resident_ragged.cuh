// Which sequences and row tiles a CTA of resident.cuh takes of a ragged batch, whose lengths only the device knows. One
// thread, which leads those that convert, draws items and tells the others of them by a ring in shared memory. An item
// is a sequence and a head of K and V, with all row tiles of the query heads that share it or a part of them.
//
// An item is drawn shortly before it is loaded, as what a CTA has drawn no other can take. A warpgroup therefore looks
// for its next row tile only among the items that were told of, while it still holds slots. Where it finds none, it
// waits for more when it has freed them.
#pragma once

#include <climits>

#include "fp8cutlass/pack_ragged.cuh"
#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/draw.cuh"
#include "fp8cutlass/sm90/resident_params.h"
#include "fp8cutlass/sm90/resident_tiles.cuh"
#include "fp8cutlass/walk/lengths.cuh"
#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass::sm90 {

// 64 rows of one query head of a sequence: what they see, and where they lie.
template <class R>
struct SequenceRowsAt {
  static constexpr int batch = 0;
  const ResidentParams& params;
  const ResidentSequence* told;
  unsigned code;  // the item's place in the ring, and the row tile of the item: in one register, as these are few

  __device__ __forceinline__ int place() const { return code % R::kTold; }
  __device__ __forceinline__ const ResidentSequence& of() const { return told[place()]; }
  __device__ __forceinline__ void find(int& part, int& of_group) const {
    params.by_group(part, of_group, of().first_row + int(code / R::kTold));
  }
  __device__ __forceinline__ int row() const {
    int part, of_group;
    find(part, of_group);
    return part * R::kRows;
  }
  __device__ __forceinline__ int head() const {
    int part, of_group;
    find(part, of_group);
    return of().kv_head * params.group + of_group;
  }
  __device__ __forceinline__ int rows(const ForwardParams&) const { return of().rows; }
  __device__ __forceinline__ int keys(const ForwardParams&) const { return of().keys; }
  __device__ __forceinline__ Band band(const ForwardParams& p) const {
    const int diagonal = p.ragged.bottom_right ? of().keys - of().rows : 0;
    return {p.window_offset + diagonal, p.causal_offset + diagonal};
  }
  __device__ __forceinline__ int source_row() const { return of().query + row(); }
  __device__ __forceinline__ int first_tile() const { return of().first_tile; }
  __device__ __forceinline__ int64_t lse(const ForwardParams& p, int i) const {
    return int64_t(head()) * p.seqlen_q + of().query + i;
  }
  __device__ __forceinline__ int64_t out(const ForwardParams& p, int i) const {
    return head() * p.o_stride_head + (of().query + i) * p.o_stride_row;
  }
};

// Of an item. Without keys there is a tile of which no row sees anything.
template <class R>
__device__ __forceinline__ int key_tiles(const ResidentSequence& of) {
  return R::kTiles == 1 ? 1 : max(1, ceil_div(of.keys, R::kTileN));
}

// RowCursor of a ragged batch.
template <class R>
class SequenceRows {
 public:
  __device__ __forceinline__ SequenceRows(const ResidentParams& params, typename R::Storage& shared, int, int warpgroup)
      : params_(params), shared_(shared), warpgroup_(warpgroup), tile_(unknown(warpgroup)) {}
  __device__ __forceinline__ bool there() const { return tile_ >= 0; }
  __device__ __forceinline__ SequenceRowsAt<R> at() const {
    return {params_, shared_.sequences, unsigned(tile_) * R::kTold + place(item_)};
  }
  // One thread looks for the next row tile, and when the warpgroup has met, all take what it found.
  __device__ __forceinline__ void look() {
    if (threadIdx.x % 128 != 0) return;
    int item = item_, tile = tile_ + R::kWarpgroups;
    bool known = true;
    while (tile >= of(item).row_tiles) {
      tile -= of(item).row_tiles, ++item;
      known = poll(shared_.told[place(item)], round(item));
      if (!known) break;
      if (of(item).row_tiles == 0) {
        tile = kNone;
        break;
      }
    }
    shared_.ahead[warpgroup_] = make_int2(item, known ? tile : unknown(tile));
  }
  __device__ __forceinline__ void go_on() {
    const int2 found = shared_.ahead[warpgroup_];
    item_ = found.x, tile_ = found.y;
    if (tile_ >= kNone) wait(shared_.told[place(item_)], round(item_));  // over; this thread reads it as well
  }
  // Whether the next row tile is none of the item of `at`.
  __device__ __forceinline__ bool has_left(const SequenceRowsAt<R>& at) const { return place(item_) != at.place(); }
  // Behind an item's last row tile of this warpgroup: frees slots by `release(first tile, end)` up to those of the next
  // row tile. Where that is not known yet, waits for it and has `load` called.
  template <class Release, class Load>
  __device__ __forceinline__ void leave(const SequenceRowsAt<R>& at, int seen, const Release& release,
                                        const Load& load) {
    release(at.first_tile() + seen, at.first_tile() + key_tiles<R>(at.of()));
    arrive(shared_.read[at.place()]);
    for (int i = at.place() + 1; i % R::kTold != place(item_); ++i) pass(i % R::kTold, release);
    find(release, load);
  }
  template <class Release, class Load>
  __device__ __forceinline__ void begin(const Release& release, const Load& load) {
    find(release, load);
  }

 private:
  static constexpr int kNone = -1;
  // How a row tile is written that lies `tile` behind the begin of an item which was not told of; and back.
  static __device__ __forceinline__ int unknown(int tile) { return kNone - 1 - tile; }
  static __device__ __forceinline__ int place(int item) { return unsigned(item) % R::kTold; }
  static __device__ __forceinline__ int round(int item) { return unsigned(item) / R::kTold & 1; }
  __device__ __forceinline__ const ResidentSequence& of(int item) const { return shared_.sequences[place(item)]; }
  template <class Release, class Load>
  __device__ __forceinline__ void find(const Release& release, const Load& load) {
    if (tile_ >= kNone) return;
    for (int tile = unknown(tile_);; ++item_) {
      wait(shared_.told[place(item_)], round(item_));
      const int tiles = of(item_).row_tiles;
      if (tiles == 0) {
        tile_ = kNone;
        return;
      }
      if (tile < tiles) {
        tile_ = tile;
        return load(at());
      }
      tile -= tiles;
      pass(place(item_), release);
    }
  }
  // An item without a row tile for this warpgroup.
  template <class Release>
  __device__ __forceinline__ void pass(int place, const Release& release) {
    const ResidentSequence& of = shared_.sequences[place];
    release(of.first_tile, of.first_tile + key_tiles<R>(of));
    arrive(shared_.read[place]);
  }

  const ResidentParams& params_;
  typename R::Storage& shared_;
  int warpgroup_, item_ = 0, tile_;
};

// What draws the items of a CTA and tells of them: one thread. Memory is asked for a tile or two before it is needed.
template <class R>
class Teller {
 public:
  bool ended = false;

  __device__ __forceinline__ void begin(const ResidentParams& params) {
    ask(params);
    if (R::kTiles == 1) draw(params);
  }
  // Tells of one more item, or that there is none.
  __device__ __forceinline__ void go_on(const ResidentParams& params, typename R::Storage& shared) {
    for (bool done = false; !done;) {
      if (!asked_) {
        if (!has_drawn_) draw(params);
        ask(params);
        draw(params);
      }
      asked_ = false;
      const Lengths of = next_;
      const int number = number_;
      if (has_drawn_ && R::kTiles == 1) ask(params), draw(params);
      done = tell(params, shared, number, of);
    }
  }
  // Of the item that was told of last, `left` of `tiles` tiles are to be loaded.
  __device__ __forceinline__ void prepare(const ResidentParams& params, int left, int tiles) {
    if (R::kTiles == 1 || ended) return;
    if (!asked_ && has_drawn_ && left <= 1) ask(params);
    if (!has_drawn_ && left <= 2 && (!asked_ || tiles == 1)) draw(params);
  }

 private:
  struct Lengths {
    int query, query_end, key, key_end, used_q, used_k;
  };
  // The first item of a CTA is dealt out, and so are all where the launch has no counters. Of a divergent atomicAdd the
  // compiler makes one with a shuffle behind it, which waits for memory at once.
  __device__ __forceinline__ void draw(const ResidentParams& params) {
    has_drawn_ = true;
    if (params.p.counters == nullptr) {
      drawn_ += int(gridDim.x);
    } else {
      asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(drawn_) : "l"(params.p.counters) : "memory");
      drawn_ += int(gridDim.x);
    }
  }
  __device__ __forceinline__ void ask(const ResidentParams& params) {
    number_ = drawn_, has_drawn_ = false, asked_ = true;
    if (number_ >= params.items) return;
    const RaggedBatch& b = params.p.ragged;
    const int s = params.by_kv_heads.div(params.by_head_items.div(number_));
    next_ = {b.cu_q[s],
             b.cu_q[s + 1],
             b.cu_k[s],
             b.cu_k[s + 1],
             b.used_q != nullptr ? b.used_q[s] : INT_MAX,
             b.used_k != nullptr ? b.used_k[s] : INT_MAX};
  }
  // Whether there was something to tell: of an item without row tiles there is not.
  __device__ __forceinline__ bool tell(const ResidentParams& params, typename R::Storage& shared, int number,
                                       const Lengths& lengths) {
    ResidentSequence of{};
    ended = number >= params.items;
    if (!ended) {
      const RaggedBatch& b = params.p.ragged;
      const Span rows = span_of(lengths.query, lengths.query_end, params.p.seqlen_q);
      const Span keys = span_of(lengths.key, lengths.key_end, b.key_tokens);
      int head, part, sequence;
      params.by_head_items(head, part, number);
      params.by_kv_heads(sequence, of.kv_head, head);
      of.query = rows.first, of.rows = between(lengths.used_q, 0, rows.count);
      of.key = keys.first, of.keys = between(lengths.used_k, 0, min(keys.count, R::kMostKeys));
      const int row_tiles = ceil_div(of.rows, R::kRows) * params.group;
      const int of_part = params.by_head_items.div(row_tiles + params.by_head_items.divisor - 1);
      of.first_row = part * of_part, of.row_tiles = min(of_part, row_tiles - of.first_row);
      if (of.row_tiles <= 0) return false;
    }
    of.first_tile = tiles_;
    const int place = unsigned(told_) % R::kTold;
    wait(shared.read[place], (unsigned(told_) / R::kTold & 1) ^ 1);
    shared.sequences[place] = of;
    arrive(shared.told[place]);
    ++told_, tiles_ += key_tiles<R>(of);
    return true;
  }

  int told_ = 0, tiles_ = 0;  // items that were told of, and their tiles
  int drawn_ = blockIdx.x, number_;
  bool has_drawn_ = true, asked_ = false;
  Lengths next_;
};

// BlockCursor of a ragged batch.
template <class R>
class SequenceBlocks {
 public:
  static constexpr int batch = 0;
  int number = 0;
  int kv_head;

  __device__ __forceinline__ SequenceBlocks(const ResidentParams& params, typename R::Storage& shared, int, bool leads)
      : shared_(shared) {
    if (!leads) return;
    teller_.begin(params);
    look(params);
  }
  __device__ __forceinline__ bool there(const ResidentParams&) const { return left_ > 0; }
  __device__ __forceinline__ int row() const { return key_; }
  __device__ __forceinline__ void go_on(const ResidentParams& params) {
    if (number++ % 2 == 0) return;
    key_ += R::kTileN;
    if (--left_ == 0) return look(params);
    teller_.prepare(params, left_, tiles_);
  }

 private:
  __device__ __forceinline__ void look(const ResidentParams& params) {
    teller_.go_on(params, shared_);
    if (teller_.ended) return leave_counters(params.p);
    const ResidentSequence& of = shared_.sequences[unsigned(item_++) % R::kTold];
    key_ = of.key, kv_head = of.kv_head, left_ = tiles_ = key_tiles<R>(of);
    teller_.prepare(params, left_, tiles_);
  }

  typename R::Storage& shared_;
  Teller<R> teller_;
  int item_ = 0, key_, tiles_, left_ = 0;  // tiles of its item, and how many of them are to be loaded
};

// TileCursor of a ragged batch.
template <class R>
class SequenceTiles {
 public:
  static constexpr bool kCut = true;  // behind its keys lie those of another sequence
  int number = 0;

  __device__ __forceinline__ SequenceTiles(const ResidentParams&, typename R::Storage& shared, int) : shared_(shared) {
    look();
  }
  __device__ __forceinline__ bool there() const { return row_tiles_ > 0; }
  __device__ __forceinline__ int keys() const { return keys_; }  // of the sequence from this tile on
  __device__ __forceinline__ void go_on() {
    ++number, keys_ -= R::kTileN;
    if (--tiles_ > 0) return;
    ++item_;
    look();
  }

 private:
  // The leader is no more tiles ahead than it may have loaded, so that it has told of no other item in this place.
  __device__ __forceinline__ void look() {
    const int place = unsigned(item_) % R::kTold;
    wait(shared_.told[place], unsigned(item_) / R::kTold & 1);
    const ResidentSequence& of = shared_.sequences[place];
    row_tiles_ = of.row_tiles, keys_ = of.keys, tiles_ = key_tiles<R>(of);
  }

  typename R::Storage& shared_;
  int item_ = 0, row_tiles_, keys_, tiles_;
};

// A ragged batch.
template <class R>
struct OfLengths {
  using Rows = SequenceRows<R>;
  using Blocks = SequenceBlocks<R>;
  using Tiles = SequenceTiles<R>;
  // Rows that belong to no sequence, by the warpgroups that multiply, which wait for the first tile anyway.
  static __device__ __forceinline__ void clear_rows(const ResidentParams& params) {
    const ForwardParams& p = params.p;
    const RaggedPack rows{p.ragged, p.o, p.o_stride_row * 2, p.lse, p.seqlen_q, p.heads, 0};
    constexpr int kWarps = R::kMultiplying / 32;
    for (int first = (int(blockIdx.x) * kWarps + int(threadIdx.x) / 32) * 32; first < p.seqlen_q;
         first += int(gridDim.x) * kWarps * 32)
      packing::clear_rows_from(rows, first);
  }
};

}  // namespace fp8cutlass::sm90
