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
FP8_HOST_DEVICE int unhoisted(int x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Causal tiles differ in length, so the longest go first, heads innermost; without a mask and with a window the tiles
// of one head are neighbours, so that its K and V are read from L2 by CTAs that run at the same time.
template <int kTileM, int kTileN, Mask kMask>
FP8_HOST_DEVICE WorkItem work_item(const ForwardParams& p, int item) {
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

// The walk of these kernels over sequences of one length: what is asked of an item's sequence, the launch's parameters
// answer. schedule_ragged.h has the other one.
template <int kTileM, int kTileN, Mask kMask>
struct DenseWork {
  using Item = WorkItem;

  // Item number n.
  FP8_HOST_DEVICE static void find(const ForwardParams& p, int n, Item& work) {
    work = work_item<kTileM, kTileN, kMask>(p, n);
  }
  FP8_HOST_DEVICE static int first_tile(const Item& work) { return kMask == Mask::window ? work.first_tile : 0; }

  // Of the sequence that an item belongs to.
  FP8_HOST_DEVICE static int rows(const ForwardParams& p, const Item&) { return p.seqlen_q; }
  FP8_HOST_DEVICE static int keys(const ForwardParams& p, const Item&) { return p.seqlen_k; }
  FP8_HOST_DEVICE static Band band(const ForwardParams& p, const Item&) { return band_of(p); }

  // The element of O where a row begins, and the place of a row's LSE.
  FP8_HOST_DEVICE static int64_t out(const ForwardParams& p, const Item& work, int row) {
    return work.batch * p.o_stride_batch + work.head * p.o_stride_head + row * p.o_stride_row;
  }
  FP8_HOST_DEVICE static int64_t lse(const ForwardParams& p, const Item& work, int row) {
    return (int64_t(work.batch) * p.heads + work.head) * p.seqlen_q + row;
  }

  // Where its descales begin: Q's of the sequence's first row, K's and V's of its first block.
  FP8_HOST_DEVICE static int64_t query_descale(const ForwardParams& p, const Item& work) {
    return (int64_t(work.batch) * p.heads + work.head) * p.q_descale_head;
  }
  FP8_HOST_DEVICE static int64_t key_descale(const ForwardParams& p, const Item& work) {
    return work.kv_head * p.k_descale_head;
  }
  FP8_HOST_DEVICE static int64_t value_descale(const ForwardParams& p, const Item& work) {
    return work.kv_head * p.v_descale_head;
  }
};

}  // namespace fp8cutlass
