// The walk over a ragged batch: sequences of unequal lengths, their tokens one after the other in (tokens, heads, D).
// Lengths are known to the device alone. A plan (plan.cuh) lists the row tiles of all sequences before the kernel runs;
// every head has the same ones. The tensors have one batch element, whose rows are all tokens.
//
// Packed V and block descales cannot lie as tightly: a sequence begins at a block of its own, number
// `key / key_block + sequence`, which is past the blocks of the sequence before, and known without a sum.
#pragma once

#include "fp8cutlass/walk/order.h"

namespace fp8cutlass {

template <Mask kMask>
struct Ragged {
  using Item = RaggedItem;
  static constexpr bool kStartsAtZero = kMask != Mask::window;
  static constexpr bool kCounted = false;

  FP8_HOST_DEVICE static int rows(const ForwardParams&, const Item& item) { return item.of.rows; }
  FP8_HOST_DEVICE static int keys(const ForwardParams&, const Item& item) { return item.of.keys; }
  FP8_HOST_DEVICE static Band band(const ForwardParams& p, const Item& item) {
    return {p.window_offset + item.diagonal, p.causal_offset + item.diagonal};
  }

  FP8_HOST_DEVICE static int batch(const Item&) { return 0; }
  FP8_HOST_DEVICE static int query_row(const Item& item) { return item.of.query + item.row; }
  FP8_HOST_DEVICE static int key_row(const Item& item) { return item.of.key; }
  template <int kKeyBlock>
  FP8_HOST_DEVICE static int value_column(const Item& item) {
    return item.of.block * kKeyBlock;
  }

  // A descale of a sequence and head has a step from sequence to sequence, one of a row or block the step of these.
  FP8_HOST_DEVICE static int64_t query_descale(const ForwardParams& p, const Item& item) {
    return int64_t(item.batch) * p.ragged.q_descale_sequence + int64_t(item.head) * p.q_descale_head +
           int64_t(item.of.query) * p.q_descale_row;
  }
  FP8_HOST_DEVICE static int64_t key_descale(const ForwardParams&, const Item& item, int) { return item.k_descale; }
  FP8_HOST_DEVICE static int64_t value_descale(const ForwardParams&, const Item& item, int) { return item.v_descale; }
  FP8_HOST_DEVICE static auto lse(const ForwardParams& p, const Item& item) {
    return [&p, query = item.of.query, head = item.head](int row) { return int64_t(head) * p.seqlen_q + query + row; };
  }

  FP8_HOST_DEVICE static int items(const ForwardParams& p, const Order& order) {
    return *p.ragged.count * order.heads.divisor;
  }
  // The heads of a row tile are neighbours, and the row tiles come in the plan's order, those with most keys first: K
  // and V are read from L2 by CTAs that run at the same time, and no long item is left for the end. Where the order
  // says so, heads that share K and V come one group after the other, for kTogether row tiles at a time.
  // The row tile of item number `n` of `items`, and the head.
  FP8_HOST_DEVICE static void find(const Order& order, int items, int n, int& tile, int& head) {
    order.heads(tile, head, n);
    if (kMask != Mask::full || !order.head_by_head) return;
    constexpr int kTogether = 32;
    const int section_items = kTogether * order.heads.divisor, section = tile / kTogether;
    const int begin = section * section_items;
    if (items - begin < section_items) return;
    const int group = order.heads_per_kv.div((n - begin) / kTogether);
    int row;
    order.heads_per_kv(row, head, n - begin - group * kTogether * order.heads_per_kv.divisor);
    tile = section * kTogether + row;
    head += group * order.heads_per_kv.divisor;
  }
  // All of an item but `of`, which is there. Of the order only heads_per_kv is asked.
  template <int kTileM, int kTileN, class Of>
  FP8_HOST_DEVICE static void complete(const ForwardParams& p, const Of& order, int head, Item& item) {
    const RowTile& of = item.of;
    item.batch = of.sequence, item.kv_head = order.heads_per_kv.div(head);
    item.head = head * item_heads<kTileM, kMask>(p);
    item.row = of.row;
    item.diagonal = p.ragged.bottom_right ? of.keys - of.rows : 0;
    const int rows = item_rows<kTileM, kMask>(p), end = of.row + rows < of.rows ? of.row + rows : of.rows;
    const Tiles tiles = tiles_of<kTileN, kMask>(of.row, end, of.keys, band(p, item));
    item.first_tile = tiles.first, item.tiles = tiles.count;
    item.k_descale =
        of.sequence * p.ragged.k_descale_sequence + item.kv_head * p.k_descale_head + of.block * p.k_descale_block;
    item.v_descale =
        of.sequence * p.ragged.v_descale_sequence + item.kv_head * p.v_descale_head + of.block * p.v_descale_block;
    item.out = int64_t(of.query + of.row) * p.o_stride_row + item.head * p.o_stride_head;
  }
  template <int kTileM, int kTileN>
  FP8_HOST_DEVICE static Item item_at(const ForwardParams& p, const Order& order, int n) {
    int tile, head;
    find(order, items(p, order), n, tile, head);
    Item item;
    item.of = p.ragged.tiles[tile];
    complete<kTileM, kTileN>(p, order, head, item);
    return item;
  }
};

}  // namespace fp8cutlass
