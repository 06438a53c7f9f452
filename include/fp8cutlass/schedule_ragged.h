// Which query tile of a ragged batch a persistent CTA works on: what schedule.h is for sequences of one length. The
// plan (walk/plan.cuh) lists the row tiles, those with most keys first, and the heads of a row tile are neighbours.
#pragma once

#include "fp8cutlass/schedule.h"
#include "fp8cutlass/walk/ragged.h"

namespace fp8cutlass {

struct RaggedWorkItem : RaggedItem {
  int item;              // its number; negative: there is no more work
  const uint8_t *q, *k;  // first row of the query tile, first row of K
  const uint8_t* v;      // first row and column of packed V: a sequence begins at a block of its own
};

// What Ragged::complete asks an order: these kernels have none, and one thread divides.
struct HeadsPerKv {
  struct {
    int heads;
    FP8_HOST_DEVICE int div(int head) const { return head / heads; }
  } heads_per_kv;
};

template <int kTileM, int kTileN, Mask kMask>
struct RaggedWork {
  using Item = RaggedWorkItem;
  using Walk = Ragged<kMask>;

  // Item number n, if there is one: the host launches for the most that there can be. Only this thread asks how many
  // there are. In the others it would cost registers that the main loop lacks.
  template <int kHeadDim, int kKeyBlock>
  FP8_HOST_DEVICE static void find(const ForwardParams& p, int n, Item& work) {
    const int heads = unhoisted(p.heads), tile = n / heads, head = n - tile * heads;
    work.item = tile < *p.ragged.count ? n : -1;
    if (work.item < 0) return;
    work.of = p.ragged.tiles[tile];
    Walk::template complete<kTileM, kTileN>(p, HeadsPerKv{{heads / unhoisted(p.kv_heads)}}, head, work);
    work.tiles += work.first_tile;  // one past the last one, as in WorkItem
    work.q = p.q + (int64_t(work.of.query) + work.row) * p.q_stride_row + head * p.q_stride_head;
    work.k = p.k + work.of.key * p.k_stride_row + work.kv_head * p.k_stride_head;
    work.v = p.v + int64_t(work.kv_head) * kHeadDim * p.seqlen_k_padded + Walk::template value_column<kKeyBlock>(work);
  }
  FP8_HOST_DEVICE static int first_tile(const Item& work) { return kMask == Mask::window ? work.first_tile : 0; }

  FP8_HOST_DEVICE static int rows(const ForwardParams& p, const Item& work) { return Walk::rows(p, work); }
  FP8_HOST_DEVICE static int keys(const ForwardParams& p, const Item& work) { return Walk::keys(p, work); }
  FP8_HOST_DEVICE static Band band(const ForwardParams& p, const Item& work) { return Walk::band(p, work); }

  FP8_HOST_DEVICE static int64_t out(const ForwardParams& p, const Item& work, int row) {
    return work.out + (row - work.row) * p.o_stride_row;
  }
  FP8_HOST_DEVICE static int64_t lse(const ForwardParams& p, const Item& work, int row) {
    return Walk::lse(p, work)(row);
  }

  FP8_HOST_DEVICE static int64_t query_descale(const ForwardParams& p, const Item& work) {
    return Walk::query_descale(p, work);
  }
  FP8_HOST_DEVICE static int64_t key_descale(const ForwardParams&, const Item& work) { return work.k_descale; }
  FP8_HOST_DEVICE static int64_t value_descale(const ForwardParams&, const Item& work) { return work.v_descale; }
};

}  // namespace fp8cutlass
