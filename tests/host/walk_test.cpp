// Which tiles an item visits, which of them need a mask, and which items there are, against plain loops over rows and
// keys. Prints one line a property; exits non-zero if any fails. Built by tests/native/test_walk_host.py.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "fp8cutlass/walk/dense.h"
#include "fp8cutlass/walk/listed.h"
#include "fp8cutlass/walk/ragged.h"
#include "fp8cutlass/walk/ragged_sizes.h"

using namespace fp8cutlass;

static int failures = 0;
static void report(bool ok, const char* what) {
  std::printf("%s %s\n", ok ? "ok" : "FAILED", what);
  failures += !ok;
}

static unsigned state = 1;
static int pick(int least, int most) {
  state = state * 1664525u + 1013904223u;
  return least + int((state >> 8) % unsigned(most - least + 1));
}

constexpr int kM = 64, kN = 32;

template <Mask kMask>
static bool sees(int row, int key, int keys, Band band) {
  if (key >= keys) return false;
  if (kMask != Mask::full && int64_t(key) > int64_t(row) + band.last) return false;
  return kMask != Mask::window || int64_t(key) >= int64_t(row) + band.first;
}

// Every visible key lies in a visited tile, no tile before the first or past the last is needed, and a tile that is not
// masked hides nothing from any row.
template <Mask kMask>
static bool spans(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int rows = pick(1, 200), keys = pick(0, 300);
    Band band{pick(-400, 300), pick(-300, 400)};
    if (kMask == Mask::window && round % 3 == 0) band.first = band.last - pick(0, 40);
    for (int row = 0; row < rows; row += kM) {
      const int end = row + kM < rows ? row + kM : rows;
      const Tiles tiles = tiles_of<kN, kMask>(row, end, keys, band);
      if (tiles.count < 1 || tiles.first < 0) return false;
      int least = keys, most = -1;
      for (int r = row; r < end; ++r)
        for (int key = 0; key < keys; ++key)
          if (sees<kMask>(r, key, keys, band)) least = key < least ? key : least, most = key > most ? key : most;
      if (most >= 0) {
        if (least < tiles.first * kN || most >= (tiles.first + tiles.count) * kN) return false;
        if (kMask == Mask::window && row + band.first >= 0 && tiles.first != (row + band.first) / kN) return false;
        if (most < (tiles.first + tiles.count - 1) * kN && kMask == Mask::causal) return false;
      }
      for (int tile = tiles.first; tile < tiles.first + tiles.count; ++tile) {
        bool hides = false;
        for (int r = row; r < row + kM; ++r)
          for (int key = tile * kN; key < (tile + 1) * kN; ++key) hides = hides || !sees<kMask>(r, key, keys, band);
        if (kMask != Mask::window) {
          if (hides != is_masked<kN, kM, kMask>(row, keys, band, tile)) return false;
          continue;
        }
        const int first = tile * kN,
                  last = first + kN - 1;  // of a tile: its ends are those that a first, a last row sees
        const int ends = kAfterBand * int(!sees<Mask::causal>(row, last, INT_MAX, band)) +
                         kBeforeBand * int(row + kM - 1 + band.first > first) + kPastKeys * int(last >= keys);
        if (hides != (ends != 0) || ends != masked_ends<kN, kM>(row, keys, band, tile)) return false;
      }
    }
  }
  return true;
}

// With a window some items are half the rows of two heads. Returns how many rows an item has.
template <Mask kMask>
static int share_items(ForwardParams& p, int round) {
  const bool in_pairs = kMask == Mask::window && p.heads / p.kv_heads % 2 == 0 && round % 4 > 0;
  p.item_rows = in_pairs ? kM / 2 : kM;
  return p.item_rows;
}

// The items of a call: each row tile of each head once, in the tensors' places.
template <Mask kMask>
static bool items(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    ForwardParams p{};
    p.kv_heads = pick(1, 3), p.heads = p.kv_heads * pick(1, 4), p.batch = pick(1, 3);
    p.seqlen_q = pick(1, 3000), p.seqlen_k = pick(1, 3000), p.sm_count = 132;
    p.causal_offset = pick(-100, 100), p.window_offset = p.causal_offset - pick(0, 500);
    p.o_stride_row = 64, p.o_stride_head = int64_t(64) * p.seqlen_q, p.o_stride_batch = p.o_stride_head * p.heads;
    const int rows = share_items<kMask>(p, round), together = kM / rows;
    const Order order = work_order(p, kM, 64, kMask);
    std::set<std::tuple<int, int, int>> seen;
    for (int n = 0; n < Dense<kMask>::items(p, order); ++n) {
      const Item item = Dense<kMask>::template item_at<kM, kN>(p, order, n);
      const int end = item.row + rows < p.seqlen_q ? item.row + rows : p.seqlen_q;
      const Tiles tiles = tiles_of<kN, kMask>(item.row, end, p.seqlen_k, band_of(p));
      const int64_t out = item.batch * p.o_stride_batch + item.head * p.o_stride_head + int64_t(64) * item.row;
      if (item.row % rows || item.row >= p.seqlen_q || item.tiles != tiles.count || item.first_tile != tiles.first)
        return false;
      if (item.kv_head != item.batch * p.kv_heads + item.head / (p.heads / p.kv_heads) || item.out != out) return false;
      for (int head = item.head; head < item.head + together; ++head)
        if (!seen.insert({item.batch, head, item.row}).second) return false;
    }
    if (int64_t(seen.size()) != work_items(p, rows) || work_items(p, rows, together) != order.items) return false;
  }
  return true;
}

// Items whose tiles lists name, with masks that batches, heads, rows or keys share: of each row tile of each head the
// list that is its own, where its bits lie, and which tile is cut.
static bool listed(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    ForwardParams p{};
    p.kv_heads = pick(1, 3), p.heads = p.kv_heads * pick(1, 4), p.batch = pick(1, 3);
    p.seqlen_q = pick(1, 900), p.seqlen_k = pick(1, 900), p.sm_count = 132;
    const int row_tiles = ceil_div(p.seqlen_q, kMaskTile), key_tiles = ceil_div(p.seqlen_k, kMaskTile);
    const int batch = pick(0, 1) ? p.batch : 1, heads = pick(0, 1) ? p.heads : 1, rows = pick(0, 1) ? row_tiles : 1;
    const int bit_tiles = pick(0, 1) ? key_tiles : 1, lists = batch * heads * rows;
    std::vector<int> tiles(size_t(lists) * key_tiles), counts(lists);
    for (int list = 0; list < lists; ++list)
      for (int tile = 0; tile < key_tiles; ++tile)
        if (pick(0, 2)) tiles[size_t(list) * key_tiles + counts[list]++] = 2 * tile + pick(0, 1);
    const uint32_t bits = 0;
    const bool with_bits = pick(0, 3) > 0;
    const TileMask mask{tiles.data(),
                        counts.data(),
                        with_bits ? &bits : nullptr,
                        batch > 1 ? heads * rows : 0,
                        heads > 1 ? rows : 0,
                        rows > 1 ? 1 : 0,
                        key_tiles,
                        bit_tiles};
    const Order order = work_order(p, kMaskTile, 64, Mask::blocks);
    std::set<std::tuple<int, int, int>> seen;
    for (int n = 0; n < Listed::items(p, order); ++n) {
      const Item item = Listed::item_at<kMaskTile, kMaskTile>(p, order, mask, n);
      const int own_batch = batch > 1 ? item.batch : 0, own_head = heads > 1 ? item.head : 0;
      const int own_row = rows > 1 ? item.row / kMaskTile : 0, list = (own_batch * heads + own_head) * rows + own_row;
      if (item.row % kMaskTile || !seen.insert({item.batch, item.head, item.row}).second) return false;
      if (counts[list] == 0) {
        if (item.tiles != 1 || Listed::entry(mask, item, 0) != 0 || Listed::visit(p, mask, item, 0) != kHidden ||
            Listed::length(mask, item) != 1)
          return false;
        continue;
      }
      if (item.tiles != counts[list] || Listed::length(mask, item) != counts[list]) return false;
      std::set<int> pairs;  // tiles of two
      int begun = 0;
      for (int i = 0; i < item.tiles; ++i) {
        const int entry = Listed::entry(mask, item, i);
        pairs.insert(entry / 4);
        begun += i == 0 || !Listed::joins(Listed::entry(mask, item, i - 1), entry);
      }
      if (begun != int(pairs.size())) return false;
      for (int i = 0; i < item.tiles; ++i) {
        const int entry = tiles[size_t(list) * key_tiles + i], visit = Listed::visit(p, mask, item, entry);
        const bool in_part = with_bits && entry % 2;
        if (Listed::entry(mask, item, i) != entry || in_part != ((visit & kSeenInPart) != 0)) return false;
        if (in_part && visit / kVisitFlags != list * bit_tiles + (bit_tiles > 1 ? entry / 2 : 0)) return false;
        if (((visit & kCut) != 0) != ((entry / 2 + 1) * kMaskTile > p.seqlen_k)) return false;
        if (!in_part && visit / kVisitFlags != 0) return false;
      }
      const Item first{1, 0, 0, 0, 0, 0, 0};
      for (const int entry : {2 * key_tiles, -1, 1 << 30}) {
        const TileMask of{&entry, counts.data(), nullptr, 0, 0, 0, key_tiles, key_tiles};
        if (Listed::entry(of, first, 0) != 2 * key_tiles - 1) return false;
      }
    }
    if (int64_t(seen.size()) != work_items(p, kMaskTile)) return false;
  }
  return true;
}

// The parts of an item that a cluster shares, laid side by side.
static bool parts() {
  for (int round = 0; round < 300; ++round) {
    Item whole{};
    whole.first_tile = pick(0, 9), whole.tiles = pick(1, 30);
    int next = whole.first_tile;
    for (int rank = 0; rank < 4; ++rank) {
      const Item part = part_of<4>(whole, rank);
      if (part.first_tile != next || part.tiles < 0) return false;
      next += part.tiles;
    }
    if (next != whole.first_tile + whole.tiles) return false;
  }
  return true;
}

// A ragged batch with the list that a plan makes, in any order: each row tile of each sequence and head once, and no
// two sequences share a block of V.
template <Mask kMask>
static bool ragged(int rounds) {
  using Walk = Ragged<kMask>;
  constexpr int kBlock = 128;
  for (int round = 0; round < rounds; ++round) {
    const int sequences = pick(1, 9);
    ForwardParams p{};
    p.batch = 1, p.kv_heads = pick(1, 3), p.heads = p.kv_heads * pick(1, 4);
    const int item_rows = share_items<kMask>(p, round), together = kM / item_rows;
    std::vector<RowTile> list;
    std::vector<int> rows_of, keys_of, blocks_used;
    int query = 0, key = 0, block_end = 0;
    for (int s = 0; s < sequences; ++s) {
      const int rows = pick(0, 300), keys = pick(0, 500), block = key / kBlock + s;
      if (block < block_end) return false;  // where the blocks of the sequence before end
      block_end = block + ceil_div(keys, kBlock);
      for (int row = 0; row < rows; row += item_rows) list.push_back({s, row, rows, keys, query, key, block, 0});
      rows_of.push_back(rows), keys_of.push_back(keys);
      query += rows, key += keys;
    }
    if (block_end > ragged_blocks(key, sequences, kBlock)) return false;
    if (int64_t(list.size()) > most_row_tiles(query, sequences, item_rows)) return false;
    int count = int(list.size());
    p.seqlen_q = query, p.seqlen_k = key, p.sm_count = 132;
    p.causal_offset = pick(-20, 20), p.window_offset = p.causal_offset - pick(0, 200);
    p.o_stride_row = int64_t(64) * p.heads, p.o_stride_head = 64;
    p.k_descale_head = block_end + 3, p.k_descale_block = 1, p.v_descale_head = 1;
    p.ragged.tiles = list.data(), p.ragged.count = &count, p.ragged.most = count, p.ragged.bottom_right = round % 2;
    p.ragged.v_descale_sequence = p.kv_heads;
    Order order = work_order(p, kM, 64, kMask);
    order.head_by_head = round % 3 == 0;
    std::set<std::tuple<int, int, int>> seen;
    for (int n = 0; n < Walk::items(p, order); ++n) {
      const RaggedItem item = Walk::template item_at<kM, kN>(p, order, n);
      const int s = item.batch, shift = round % 2 ? keys_of[s] - rows_of[s] : 0;
      const Band band{p.window_offset + shift, p.causal_offset + shift};
      const int end = item.row + item_rows < rows_of[s] ? item.row + item_rows : rows_of[s];
      const Tiles tiles = tiles_of<kN, kMask>(item.row, end, keys_of[s], band);
      if (item.tiles != tiles.count || item.first_tile != tiles.first || Walk::rows(p, item) != rows_of[s] ||
          Walk::keys(p, item) != keys_of[s] || Walk::band(p, item).first != band.first)
        return false;
      if (item.kv_head != item.head / (p.heads / p.kv_heads)) return false;
      if (Walk::query_row(item) - item.row != list[0].query && s == list[0].sequence) return false;
      if (item.out != int64_t(Walk::query_row(item)) * p.o_stride_row + 64 * item.head) return false;
      if (Walk::key_descale(p, item, item.kv_head) != item.kv_head * (block_end + 3) + item.of.block) return false;
      if (Walk::value_descale(p, item, item.kv_head) != s * p.kv_heads + item.kv_head) return false;
      if (Walk::lse(p, item)(item.row) != int64_t(item.head) * query + Walk::query_row(item)) return false;
      for (int head = item.head; head < item.head + together; ++head)
        if (!seen.insert({s, head, item.row}).second) return false;
    }
    if (seen.size() != list.size() * size_t(p.heads)) return false;
  }
  return true;
}

int main() {
  report(spans<Mask::full>(200), "without a mask every key is visited, and only the last tile is masked");
  report(spans<Mask::causal>(200), "a diagonal is visited to its end, masked where it hides a key");
  report(spans<Mask::window>(400), "a window is visited from its begin to its end, masked where it hides a key");
  report(items<Mask::full>(60), "items without a mask cover every row tile once");
  report(items<Mask::causal>(60), "items with a diagonal cover every row tile once");
  report(items<Mask::window>(120), "items of a window cover every row tile once");
  report(parts(), "the parts of an item lie side by side");
  report(ragged<Mask::full>(60), "ragged items cover every row tile of every sequence once");
  report(ragged<Mask::causal>(60), "ragged items with a diagonal, of either alignment, do");
  report(ragged<Mask::window>(120), "ragged items of a window do");
  report(listed(400), "items whose tiles are listed cover every row tile once, each with its own list and bits");
  std::printf("%d failures\n", failures);
  return failures != 0;
}
