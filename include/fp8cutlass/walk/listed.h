// The walk over sequences of one length whose row tiles visit the tiles of keys that a list names. Host-callable.
#pragma once

#include "fp8cutlass/walk/dense.h"
#include "fp8cutlass/walk/tile_mask.h"

namespace fp8cutlass {

struct Listed : Dense<Mask::blocks> {
  // Item number `n`. Its first_tile is the number of its list. An item without tiles visits one all the same, so that
  // its rows are no special case; then first_tile is -1.
  template <int kTileM, int kTileN>
  FP8_HOST_DEVICE static Item item_at(const ForwardParams& p, const Order& order, const TileMask& mask, int n) {
    static_assert(kTileM == kMaskTile && (kTileN == kMaskTile || kTileN == 2 * kMaskTile));
    Item item = fp8cutlass::item_at<kTileM, kTileN, Mask::full>(p, order, n);
    const int list = list_of(mask, item.batch, item.head, item.row / kTileM);
    const int count = smaller(mask.counts[list], mask.key_tiles);
    item.tiles = count > 0 ? count : 1;
    item.first_tile = count > 0 ? list : -1;
    return item;
  }

  // Entry `i` of its list.
  FP8_HOST_DEVICE static int entry(const TileMask& mask, const Item& item, int i) {
    return item.first_tile < 0 ? 0 : entry_of(mask, item.first_tile, i);
  }

  // Entries of an item's list.
  FP8_HOST_DEVICE static int length(const TileMask& mask, const Item& item) {
    return item.first_tile < 0 ? 1 : smaller(mask.counts[item.first_tile], mask.key_tiles);
  }

  // Whether an entry's tile is the second half of a tile of two, whose first half is that of the entry before it.
  FP8_HOST_DEVICE static bool joins(int before, int entry) { return entry / 2 % 2 == 1 && before / 2 + 1 == entry / 2; }

  // Of an entry of its list.
  FP8_HOST_DEVICE static int visit(const ForwardParams& p, const TileMask& mask, const Item& item, int entry) {
    if (item.first_tile < 0) return kHidden;
    const int tile = entry / 2, place = mask.bit_tiles > 1 ? item.first_tile * mask.bit_tiles + tile : item.first_tile;
    const bool in_part = entry % 2 != 0 && mask.bits != nullptr;
    return ((tile + 1) * kMaskTile > p.seqlen_k ? kCut : 0) + (in_part ? kSeenInPart + kVisitFlags * place : 0);
  }
};

}  // namespace fp8cutlass
