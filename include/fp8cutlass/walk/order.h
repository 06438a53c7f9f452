// The order in which the items of sequences of one length are numbered. Host-callable.
#pragma once

#include "fp8cutlass/walk/divisor.h"
#include "fp8cutlass/walk/item.h"

namespace fp8cutlass {

// Items are numbered phase by phase, in a phase section by section of heads, in a section row by row from the last one,
// its heads innermost. To find one is the loader's longest way from item to item, so that what it divides by is
// prepared.
struct Phase {
  int first_item;
  int first_tile, tiles;  // of queries, the same of every head
  Divisor section_items;  // of a section that is not narrower than the others
};

struct Order {
  static constexpr int kMaxPhases = 4;
  int items, section;           // `section` heads are finished before the next ones begin
  int last_section;             // the first head of the last section, which may be narrower
  Divisor width, last_width;    // heads of a section, of the last one
  Divisor heads, heads_per_kv;  // of Q: in all of a batch element, that share K and V; as items have them
  int phases;
  Phase phase[kMaxPhases];
  bool head_by_head;  // of a ragged batch, see Ragged::find
};

// Without a mask there is one phase. With a causal mask items differ in length, and who draws a long one last is still
// at it when the others have gone home. So rows are taken in phases, each over all sections and from its last rows to
// its first: first the upper three quarters of the rows, and a quarter, a sixteenth of the work, for the end. Long
// sequences have few items, all the longer: there, phases halve three times. Short ones have many, which are short, and
// a second phase would read K and V once more: there is one, but where rows are wide, which was not faster.
inline void add_phases(Order& order, int tiles, int heads, bool is_causal, bool is_wide) {
  constexpr int kShortTiles = 8, kLongTiles = 32;
  const bool one_phase = !is_causal || (tiles <= kShortTiles && !is_wide), is_long = tiles >= kLongTiles;
  int first_item = 0;
  for (int end = tiles; end > 0;) {
    const int first_tile = one_phase ? 0 : is_long ? (end > tiles / 8 ? end / 2 : 0) : end == tiles ? tiles / 4 : 0;
    order.phase[order.phases++] = {first_item, first_tile, end - first_tile, order.section * (end - first_tile)};
    first_item += (end - first_tile) * heads;
    end = first_tile;
  }
}

// K and V of a section stay in L2 while the CTAs that read them walk through. With a causal mask those are at different
// places of it, so a section is as many heads as fit a third of the 50 MB of an H100 (two thirds where rows are wide
// and many, 1 to 3% faster there). With a window a row tile sees a few keys of a head, and all of them may fit: CTAs
// end with short items then, the first rows of all heads. Short sequences are 2 to 10% faster with no more heads than
// would fit it with 2048 keys (docs/lab/sm90a.md, row 42), as long as these have about two items an SM. Without a mask
// CTAs walk in step, and the heads that share K and V suffice. So do they in a ragged batch whose sequences do not fit
// L2 with all of their heads. Sections are about equally wide: a narrow last one would leave CTAs idle.
inline Order work_order(const ForwardParams& p, int tile_m, int head_dim, Mask mask) {
  constexpr int64_t kManyKeys = 2048;
  const bool is_causal = mask == Mask::causal, is_window = mask == Mask::window;
  const bool is_wide = head_dim > 128;
  const int rows = item_rows(p, tile_m, mask), together = item_heads(p, tile_m, mask);
  const int row_tiles = ceil_div(p.seqlen_q, rows);
  const int64_t group = p.heads / p.kv_heads / together, heads = int64_t(p.batch) * p.heads / together;
  const int64_t l2_bytes = is_wide && p.seqlen_k >= kManyKeys ? 34'000'000 : 16'000'000;
  const auto sections_of = [&](int64_t keys) {  // of which one fits in L2 with so many keys a head
    const int64_t fit = is_causal || is_window ? l2_bytes / (keys * 2 * head_dim) * group : group;
    return fit > group ? (heads + fit - 1) / fit : heads / group;
  };
  const int64_t in_band = int64_t(p.causal_offset) - p.window_offset + rows;  // keys that an item of a window sees
  int64_t sections = sections_of(is_window && in_band > 0 && in_band < p.seqlen_k ? in_band : p.seqlen_k);
  if (is_causal && p.seqlen_k < kManyKeys) {
    const int64_t two_items = ceil_div(2 * p.sm_count, row_tiles);  // heads that have two for each SM
    const int64_t narrow = sections_of(kManyKeys), most = (heads + two_items / 2) / two_items;
    const int64_t wanted = narrow < most ? narrow : most;
    sections = wanted > sections ? wanted : sections;
  }
  Order order{};
  order.items = int(work_items(p, rows, together));
  order.section = int((heads + sections - 1) / sections);
  order.last_section = int((heads - 1) / order.section * order.section);
  order.width = order.section;
  order.last_width = int(heads) - order.last_section;
  order.heads = p.heads / together;
  order.heads_per_kv = int(group);
  if (p.ragged.sequences > 0 && mask == Mask::full) {
    const int64_t keys = p.ragged.key_tokens / p.ragged.sequences;  // on average; the host does not know more
    order.head_by_head = p.kv_heads * keys * 2 * head_dim > l2_bytes;
  }
  add_phases(order, row_tiles, int(heads), is_causal, is_wide);
  return order;
}

// Item number `n`.
template <int kTileM, int kTileN, Mask kMask>
FP8_HOST_DEVICE Item item_at(const ForwardParams& p, const Order& order, int n) {
  int number = 0;
  while (number + 1 < order.phases && n >= order.phase[number + 1].first_item) ++number;
  const Phase& phase = order.phase[number];
  int section, rest, row, head;
  phase.section_items(section, rest, n - phase.first_item);
  const int first_head = section * order.section;
  (first_head == order.last_section ? order.last_width : order.width)(row, head, rest);
  Item item;
  const int rows = item_rows<kTileM, kMask>(p), together = item_heads<kTileM, kMask>(p);
  item.row = (phase.first_tile + phase.tiles - 1 - row) * rows;
  order.heads(item.batch, item.head, first_head + head);
  item.kv_head = item.batch * p.kv_heads + order.heads_per_kv.div(item.head);
  item.head *= together;
  const int rows_end = item.row + rows < p.seqlen_q ? item.row + rows : p.seqlen_q;
  const Tiles tiles = tiles_of<kTileN, kMask>(item.row, rows_end, p.seqlen_k, band_of(p));
  item.out = item.batch * p.o_stride_batch + item.head * p.o_stride_head + item.row * p.o_stride_row;
  item.first_tile = tiles.first;
  item.tiles = tiles.count;
  return item;
}

// The part of an item that one CTA of a cluster takes. It may be empty.
template <int kSplit>
FP8_HOST_DEVICE Item part_of(Item item, int rank) {
  const int tiles = item.tiles;
  const int first = tiles * rank / kSplit;
  item.first_tile += first;
  item.tiles = tiles * (rank + 1) / kSplit - first;
  return item;
}

}  // namespace fp8cutlass
