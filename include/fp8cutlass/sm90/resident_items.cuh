// Which heads and row tiles a CTA of resident.cuh takes, and in which order. Items are dealt out in turns.
#pragma once

#include "fp8cutlass/sm90/resident_params.h"

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

// 64 rows of one query head.
struct RowTileAt {
  int batch, head, row;  // head: in its batch element
};

// The row tiles of a warpgroup, one after the other: every kWarpgroups-th of those of the CTA.
class RowCursor {
 public:
  int item = 0;  // the CTA's, counted from its first

  __device__ __forceinline__ RowCursor(const ResidentParams& params, int warpgroup)
      : number_(blockIdx.x), ahead_(warpgroup) {
    find(params);
  }
  __device__ __forceinline__ bool there() const { return tile_ >= 0; }
  __device__ __forceinline__ RowTileAt at(const ResidentParams& params) const {
    int of_group, part;
    params.by_row_tiles(of_group, part, tile_);
    return {batch_, first_head_ + of_group, part * 64};
  }
  template <int kWarpgroups>
  __device__ __forceinline__ void go_on(const ResidentParams& params) {
    tile_ += kWarpgroups;
    if (tile_ < end_) return;
    ahead_ = tile_ - end_, ++item, number_ += int(gridDim.x);
    find(params);
  }

 private:
  // The row tile that lies `ahead_` behind the begin of item `number_`.
  __device__ __forceinline__ void find(const ResidentParams& params) {
    tile_ = -1;
    for (; number_ < params.items; ++item, number_ += int(gridDim.x)) {
      const ResidentItem of(params, number_);
      if (of.tile + ahead_ < of.end) {
        tile_ = of.tile + ahead_, end_ = of.end, batch_ = of.batch, first_head_ = of.kv_head * params.group;
        return;
      }
      ahead_ -= of.end - of.tile;
    }
  }

  int number_, ahead_;
  int tile_ = -1, end_ = 0, batch_ = 0, first_head_ = 0;
};

// The blocks of K and V that a CTA loads: of each tile of keys that of K, then that of V.
struct BlockCursor {
  int number = 0;  // of the blocks of the CTA
  int tile = 0, batch, kv_head;

  __device__ __forceinline__ explicit BlockCursor(const ResidentParams& params) : item_(blockIdx.x) { look(params); }
  __device__ __forceinline__ bool there(const ResidentParams& params) const { return item_ < params.items; }
  __device__ __forceinline__ void go_on(const ResidentParams& params, int tiles) {
    if (number++ % 2 == 0 || ++tile < tiles) return;
    tile = 0, item_ += int(gridDim.x);
    look(params);
  }

 private:
  __device__ __forceinline__ void look(const ResidentParams& params) {
    const ResidentItem of(params, item_);
    batch = of.batch, kv_head = of.kv_head;
  }
  int item_;
};

}  // namespace fp8cutlass::sm90
