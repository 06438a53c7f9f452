// Which query tile a persistent CTA works on, and which tiles of keys, where lists of a mask name these: what
// schedule.h is for bands. Host-callable.
#pragma once

#include "fp8cutlass/schedule.h"
#include "fp8cutlass/walk/tile_mask.h"

namespace fp8cutlass {

struct ListedWorkItem : WorkItem {
  int list;  // its number
};

// Tiles of an item are counted along its list, whose entries are kParts of them each.
template <int kTileM, int kTileN>
struct ListedWork : DenseWork<kTileM, kTileN, Mask::full> {
  using Item = ListedWorkItem;
  static constexpr int kParts = kMaskTile / kTileN;
  static_assert(kMaskTile % kTileM == 0 && kMaskTile % kTileN == 0);

  // Item number n.
  FP8_HOST_DEVICE static void find(const ForwardParams& p, const TileMask& mask, int n, Item& work) {
    static_cast<WorkItem&>(work) = work_item<kTileM, kTileN, Mask::full>(p, n);
    work.list = list_of(mask, work.batch, work.head, work.row / kMaskTile);
    work.tiles = kParts * smaller(mask.counts[work.list], mask.key_tiles);
  }

  // The entry that a tile is of.
  FP8_HOST_DEVICE static int entry(const TileMask& mask, const Item& work, int tile) {
    return entry_of(mask, work.list, tile / kParts);
  }
  FP8_HOST_DEVICE static int first_key(int entry, int tile) { return entry / 2 * kMaskTile + tile % kParts * kTileN; }

  // Bits of an entry's tile; null where all rows see all of it.
  FP8_HOST_DEVICE static const uint32_t* bits(const TileMask& mask, const Item& work, int entry) {
    if (entry % 2 == 0 || mask.bits == nullptr) return nullptr;
    const int64_t place = mask.bit_tiles > 1 ? int64_t(work.list) * mask.bit_tiles + entry / 2 : work.list;
    return mask.bits + place * kMaskTileWords;
  }
};

}  // namespace fp8cutlass
