// The walk over sequences of one length: what is asked of an item's sequence, the launch's parameters answer.
#pragma once

#include "fp8cutlass/walk/order.h"

namespace fp8cutlass {

template <Mask kMask>
struct Dense {
  using Item = fp8cutlass::Item;
  static constexpr bool kStartsAtZero = kMask != Mask::window;  // the first tile of every item
  static constexpr bool kCounted = true;                        // the host knows how many items there are

  // Of the sequence that an item belongs to.
  FP8_HOST_DEVICE static int rows(const ForwardParams& p, const Item&) { return p.seqlen_q; }
  FP8_HOST_DEVICE static int keys(const ForwardParams& p, const Item&) { return p.seqlen_k; }
  FP8_HOST_DEVICE static Band band(const ForwardParams& p, const Item&) { return band_of(p); }

  // Where it lies in the tensors: its batch element, the row of Q where the item begins, the first row of K and the
  // first column of packed V.
  FP8_HOST_DEVICE static int batch(const Item& item) { return item.batch; }
  FP8_HOST_DEVICE static int query_row(const Item& item) { return item.row; }
  FP8_HOST_DEVICE static int key_row(const Item&) { return 0; }
  template <int kKeyBlock>
  FP8_HOST_DEVICE static int value_column(const Item&) {
    return 0;
  }

  // Where its descales begin: Q's of the sequence's first row, K's and V's of its first block; and the LSE of a row.
  FP8_HOST_DEVICE static int64_t query_descale(const ForwardParams& p, const Item& item) {
    const int64_t head = int64_t(item.batch) * p.heads + item.head;
    return head * p.q_descale_head;
  }
  FP8_HOST_DEVICE static int64_t key_descale(const ForwardParams& p, const Item&, int kv_head) {
    return int64_t(kv_head) * p.k_descale_head;
  }
  FP8_HOST_DEVICE static int64_t value_descale(const ForwardParams& p, const Item&, int kv_head) {
    return int64_t(kv_head) * p.v_descale_head;
  }
  FP8_HOST_DEVICE static auto lse(const ForwardParams& p, const Item& item) {
    return [&p, batch = item.batch, head = item.head](int row) {
      return (int64_t(batch) * p.heads + head) * p.seqlen_q + row;
    };
  }

  // Items, and item number `n`.
  FP8_HOST_DEVICE static int items(const ForwardParams&, const Order& order) { return order.items; }
  template <int kTileM, int kTileN>
  FP8_HOST_DEVICE static Item item_at(const ForwardParams& p, const Order& order, int n) {
    return fp8cutlass::item_at<kTileM, kTileN, kMask>(p, order, n);
  }
};

}  // namespace fp8cutlass
