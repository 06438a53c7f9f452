// A mask as a kernel gets it: which tiles of keys each tile of rows visits, and bits of those that it sees in part.
// python/fp8cutlass/masks/bits.py makes the lists, and defines the order of their bits. Host-callable.
#pragma once

#include <cstdint>

#include "fp8cutlass/host_device.h"

namespace fp8cutlass {

constexpr int kMaskTile = 128;                              // rows, and keys
constexpr int kMaskTileWords = kMaskTile * kMaskTile / 32;  // two for each thread of two warpgroups

// What a tile of rows visits, in its list: 2 * tile + (1 if it sees the tile in part), ascending.
struct TileMask {
  const int* tiles;                     // (lists, key_tiles)
  const int* counts;                    // (lists,): entries of a list
  const uint32_t* bits;                 // (lists, bit_tiles, kMaskTileWords); null where no tile is seen in part
  int list_batch, list_head, list_row;  // steps from list to list; 0 where they share one
  int key_tiles;                        // of keys
  int bit_tiles;                        // key_tiles, or 1 where all keys have the same bits
};

// The number of the list of a tile of rows.
FP8_HOST_DEVICE int list_of(const TileMask& mask, int batch, int head, int row_tile) {
  return batch * mask.list_batch + head * mask.list_head + row_tile * mask.list_row;
}

// Entry `i` of a list. One that is out of range becomes one in range.
FP8_HOST_DEVICE int entry_of(const TileMask& mask, int list, int i) {
  const unsigned entry = mask.tiles[int64_t(list) * mask.key_tiles + i], end = 2 * mask.key_tiles;
  return int(entry < end ? entry : end - 1);
}

// What those that compute are told of a tile: kSeenWhole, or kCut (keys end in it), kSeenInPart with the number of its
// bits, or both; kHidden where nothing is seen.
constexpr int kSeenWhole = 0, kCut = 1, kSeenInPart = 2, kVisitFlags = 4, kHidden = -1;

}  // namespace fp8cutlass
