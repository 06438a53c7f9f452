// Which heads and row tiles a CTA of resident.cuh takes of a batch whose sequences are alike, and in which order. Items
// are dealt out in turns.
#pragma once

#include "fp8cutlass/sm90/resident_params.h"
#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass::sm90 {

// How many items this CTA has.
__device__ __forceinline__ int items_of(const ResidentParams& params) {
  const int left = params.items - int(blockIdx.x) + int(gridDim.x) - 1;
  return left / int(gridDim.x);
}

// A head of K and V with the row tiles of an item.
struct ResidentItem {
  int batch, kv_head;  // kv_head: in its batch element
  int tile, end;       // row tiles, of all query heads that share it

  __device__ __forceinline__ ResidentItem(const ResidentParams& params, int number) {
    int head = number;
    tile = 0, end = params.head_tiles;
    if (number >= params.whole) {
      int part;
      params.by_head_items(head, part, number - params.whole);
      head += params.whole, tile = part * params.item_tiles, end = min(tile + params.item_tiles, end);
    }
    params.by_kv_heads(batch, kv_head, head);
  }
};

// 64 rows of one query head: what they see, and where they lie.
struct RowTileAt {
  int batch, head_, row_;  // head: in its batch element
  int first;               // tile of keys of its item, counted over those of the CTA

  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ int rows(const ForwardParams& p) const { return p.seqlen_q; }
  __device__ __forceinline__ int keys(const ForwardParams& p) const { return p.seqlen_k; }
  __device__ __forceinline__ Band band(const ForwardParams& p) const { return band_of(p); }
  __device__ __forceinline__ int source_row() const { return row_; }
  __device__ __forceinline__ int first_tile() const { return first; }
  __device__ __forceinline__ int64_t lse(const ForwardParams& p, int i) const {
    return (int64_t(batch) * p.heads + head_) * p.seqlen_q + i;
  }
  __device__ __forceinline__ int64_t out(const ForwardParams& p, int i) const {
    return batch * p.o_stride_batch + head_ * p.o_stride_head + i * p.o_stride_row;
  }
};

// The row tiles of a warpgroup, one after the other: every kWarpgroups-th of those of the CTA.
template <class R>
class RowCursor {
 public:
  __device__ __forceinline__ RowCursor(const ResidentParams& params, typename R::Storage&, int tiles, int warpgroup)
      : params_(params), tiles_(tiles), number_(blockIdx.x), ahead_(warpgroup) {
    find();
  }
  __device__ __forceinline__ bool there() const { return tile_ >= 0; }
  __device__ __forceinline__ RowTileAt at() const {
    int of_group, part;
    params_.by_row_tiles(of_group, part, tile_);
    return {batch_, first_head_ + of_group, part * 64, first_tile()};
  }
  __device__ __forceinline__ void look() {}
  __device__ __forceinline__ void go_on() {
    tile_ += R::kWarpgroups;
    if (tile_ < end_) return;
    ahead_ = tile_ - end_, ++item_, number_ += int(gridDim.x);
    find();
  }
  // Whether the next row tile is none of the item of `at`.
  __device__ __forceinline__ bool has_left(const RowTileAt& at) const { return first_tile() != at.first; }
  // Before the first row tile, and behind an item's last one of this warpgroup, which has multiplied `seen` of its
  // tiles of keys: frees slots by `release(first tile, end)` up to those of the next row tile.
  template <class Release, class Load>
  __device__ __forceinline__ void begin(const Release& release, const Load& load) {
    if (there()) load(at());
    release(0, first_tile());
  }
  template <class Release, class Load>
  __device__ __forceinline__ void leave(const RowTileAt& at, int seen, const Release& release, const Load&) {
    release(at.first + seen, first_tile());
  }

 private:
  // Of the item of the next row tile; once there is none, the number of all.
  __device__ __forceinline__ int first_tile() const { return item_ * tiles_; }
  // The row tile that lies `ahead_` behind the begin of item `number_`.
  __device__ __forceinline__ void find() {
    tile_ = -1;
    for (; number_ < params_.items; ++item_, number_ += int(gridDim.x)) {
      const ResidentItem of(params_, number_);
      if (of.tile + ahead_ < of.end) {
        tile_ = of.tile + ahead_, end_ = of.end, batch_ = of.batch, first_head_ = of.kv_head * params_.group;
        return;
      }
      ahead_ -= of.end - of.tile;
    }
  }

  const ResidentParams& params_;
  int tiles_, number_, ahead_;
  int item_ = 0;  // the CTA's, counted from its first
  int tile_ = -1, end_ = 0, batch_ = 0, first_head_ = 0;
};

// The blocks of K and V that a CTA loads: of each tile of keys that of K, then that of V.
template <class R>
class BlockCursor {
 public:
  int number = 0;  // of the blocks of the CTA
  int batch, kv_head;

  // `leads`: this thread loads them.
  __device__ __forceinline__ BlockCursor(const ResidentParams& params, typename R::Storage&, int tiles, bool)
      : tiles_(tiles), item_(blockIdx.x) {
    look(params);
  }
  __device__ __forceinline__ bool there(const ResidentParams& params) const { return item_ < params.items; }
  __device__ __forceinline__ int row() const { return tile_ * R::kTileN; }
  __device__ __forceinline__ void go_on(const ResidentParams& params) {
    if (number++ % 2 == 0 || ++tile_ < tiles_) return;
    tile_ = 0, item_ += int(gridDim.x);
    look(params);
  }

 private:
  __device__ __forceinline__ void look(const ResidentParams& params) {
    const ResidentItem of(params, item_);
    batch = of.batch, kv_head = of.kv_head;
  }
  int tiles_, tile_ = 0, item_;
};

// The tiles of keys of a CTA, as those see them who convert.
template <class R>
class TileCursor {
 public:
  static constexpr bool kCut = false;  // what lies past the keys arrives as zeros
  int number = 0;

  __device__ __forceinline__ TileCursor(const ResidentParams& params, typename R::Storage&, int tiles)
      : all_(items_of(params) * tiles) {}
  __device__ __forceinline__ bool there() const { return number < all_; }
  __device__ __forceinline__ int keys() const { return R::kTileN; }
  __device__ __forceinline__ void go_on() { ++number; }

 private:
  int all_;
};

// A batch whose sequences are alike.
template <class R>
struct Alike {
  using Rows = RowCursor<R>;
  using Blocks = BlockCursor<R>;
  using Tiles = TileCursor<R>;
  static __device__ __forceinline__ void clear_rows(const ResidentParams&) {}
};

}  // namespace fp8cutlass::sm90
