// A work item: a tile of query rows of one head, and the tiles of keys that it visits.
#pragma once

#include <cstdint>

#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass {

struct alignas(16) Item {
  int tiles;       // KV tiles to visit; 0: there is no more work (or, of a split, nothing for this CTA)
  int first_tile;  // where they begin
  int row;         // first query row, in its sequence
  int batch, head;
  int kv_head;  // batch * kv_heads + head of K and V; of a ragged batch the head alone
  int64_t out;  // the element of O where its first row begins
};

// The same in a ragged batch, where sequences differ: an item knows its own, from the plan's entry of its row tile.
struct alignas(16) RaggedItem : Item {
  RowTile of;
  int k_descale, v_descale;  // where those of its sequence and head begin
  int diagonal;              // added to both ends of the band: keys - rows where the last row sees the last key, else 0
};

// With a window an item may be fewer rows of several neighbouring heads that share K and V: those rows see fewer keys
// between them. Rows of an item, and heads.
FP8_HOST_DEVICE int item_rows(const ForwardParams& p, int tile_m, Mask mask) {
  return mask == Mask::window ? p.item_rows : tile_m;
}
FP8_HOST_DEVICE int item_heads(const ForwardParams& p, int tile_m, Mask mask) {
  return mask == Mask::window ? tile_m / p.item_rows : 1;
}
template <int kTileM, Mask kMask>
FP8_HOST_DEVICE int item_rows(const ForwardParams& p) {
  return item_rows(p, kTileM, kMask);
}
template <int kTileM, Mask kMask>
FP8_HOST_DEVICE int item_heads(const ForwardParams& p) {
  return item_heads(p, kTileM, kMask);
}
// What the launch takes: as few rows as two warpgroups need that have a head each.
FP8_HOST_DEVICE int fewest_item_rows(const ForwardParams& p, int tile_m, Mask mask) {
  return mask == Mask::window && tile_m == 128 && p.heads / p.kv_heads % 2 == 0 ? tile_m / 2 : tile_m;
}

// Items of a call whose sequences are alike.
FP8_HOST_DEVICE int64_t work_items(const ForwardParams& p, int rows, int heads = 1) {
  return int64_t(ceil_div(p.seqlen_q, rows)) * p.batch * (p.heads / heads);
}

}  // namespace fp8cutlass
