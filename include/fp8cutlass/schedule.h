// Which query tile a persistent CTA works on. Host-callable: tests/host checks that every tile is visited once.
#pragma once

#include "fp8cutlass/walk/item.h"

namespace fp8cutlass {

struct WorkItem {
  int item;              // its number
  int batch, head;       // head of Q
  int row;               // first query row
  int tiles;             // one past the last KV tile that any row of the tile can see
  int first_tile;        // of a window: the first one; else not set, as it is 0
  int64_t kv_head;       // batch * kv_heads + head of K and V
  const uint8_t *q, *k;  // first row of the query tile, first row of K
};

// The value, hidden from the optimiser: what follows from it is computed where it is used instead of being hoisted out
// of the persistent loop into registers that the main loop needs.
CUTE_HOST_DEVICE int unhoisted(int x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Causal tiles differ in length, so the longest go first, heads innermost; without a mask and with a window the tiles
// of one head are neighbours, so that its K and V are read from L2 by CTAs that run at the same time.
template <int kTileM, int kTileN, Mask kMask>
CUTE_HOST_DEVICE WorkItem work_item(const ForwardParams& p, int item) {
  constexpr bool kCausal = kMask == Mask::causal;
  const int seqlen_q = unhoisted(p.seqlen_q), seqlen_k = unhoisted(p.seqlen_k);
  const int m_tiles = ceil_div(seqlen_q, kTileM);
  const int heads = p.batch * p.heads;
  const int head = kCausal ? item % heads : item / m_tiles;
  const int m_tile = kCausal ? m_tiles - 1 - item / heads : item % m_tiles;
  WorkItem work;
  work.item = item;
  work.batch = head / p.heads;
  work.head = head % p.heads;
  const int kv_head = work.head / (p.heads / p.kv_heads);
  work.kv_head = int64_t(work.batch) * p.kv_heads + kv_head;
  work.row = m_tile * kTileM;
  work.q = p.q + work.batch * p.q_stride_batch + work.head * p.q_stride_head + work.row * p.q_stride_row;
  work.k = p.k + work.batch * p.k_stride_batch + kv_head * p.k_stride_head;
  const int rows_end = work.row + kTileM < seqlen_q ? work.row + kTileM : seqlen_q;
  if (kMask == Mask::window) {
    const Tiles tiles = tiles_of<kTileN, kMask>(work.row, rows_end, seqlen_k, band_of(p));
    work.first_tile = tiles.first, work.tiles = tiles.first + tiles.count;
    return work;
  }
  int64_t keys = seqlen_k;
  if (kCausal) {
    const int64_t visible = int64_t(rows_end) + p.causal_offset;  // one past the last key that the last row sees
    keys = visible < 0 ? 0 : visible < keys ? visible : keys;
  }
  work.tiles = ceil_div(int(keys), kTileN);
  return work;
}

}  // namespace fp8cutlass
