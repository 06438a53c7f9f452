// Copies the keys of one warp's slices from the cache to shared memory, some slices ahead of the products.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/rows.h"
#include "fp8cutlass/decode/stream.cuh"
#include "fp8cutlass/delay.cuh"

namespace fp8cutlass::decode {

// A slice: kSlice keys of K and V, and their descales where tokens have them.
template <int kHeadDim, int kSlice>
struct Slot {
  alignas(128) uint8_t k[kSlice * Rows<kHeadDim>::kPitch];
  alignas(128) uint8_t v[kSlice * Rows<kHeadDim>::kPitch];
  float k_descale[kSlice], v_descale[kSlice];
};

template <int kHeadDim, int kRows, int kSlice, int kWarps>
struct Fetcher {
  static constexpr int kTile = kSlice * kWarps;

  Shares<kRows, kTile> shares;
  Share share{};
  int tile = 0;             // of the share, the next one to load
  int page = 0, token = 0;  // where this lane's key of that tile lies
  bool more = true;

  __device__ __forceinline__ Fetcher(const DecodeParams& p, const Cut& from, const Cut& to) : shares(from, to) {
    share.sequence = -1;
    step(p);
  }

  // The slice to load: keys from here on.
  __device__ __forceinline__ int key() const { return share.first_key + tile * kTile + int(threadIdx.x) / 32 * kSlice; }

  // Goes to the next share with keys where this one is done, and looks up the pages of the slice: they are there when
  // it is loaded.
  __device__ __forceinline__ void step(const DecodeParams& p) {
    while (more && tile >= share.tiles) more = shares.next(p.batch, share), tile = 0;
    if (!more) return;
    const unsigned own = key() + threadIdx.x % kSlice, entry = own / unsigned(p.page_size);
    token = int(own - entry * unsigned(p.page_size));
    page = p.page_table[share.sequence * p.table_row + min(int(entry), p.entries - 1)];
  }

  // Issues the copies of the slice into `slot`, and goes on to the next. Keys that no row of the unit sees are zeros
  // and are not read.
  __device__ __forceinline__ void load(const DecodeParams& p, Slot<kHeadDim, kSlice>& slot) {
    if (!more) return;
    delay_point(19);
    constexpr int kChunks = kHeadDim / 16;
    constexpr int kLanes = kChunks > 8 ? kChunks % 8 == 0 ? 8 : 4 : kChunks % 4 == 0 ? kChunks : 2;  // of a key
    constexpr int kKeys = 32 / kLanes;                                                               // at a time
    const int lane = threadIdx.x % 32, first = share.seen.first - key(), end = share.seen.end - key();
    const int own_page = clamped(page, 0, p.pages - 1);
#pragma unroll
    for (int i = 0; i < kSlice; i += kKeys) {
      const int row = i + lane / kLanes;
      const int64_t at_page = __shfl_sync(~0u, own_page, row), at_token = __shfl_sync(~0u, token, row);
      const uint8_t* k = p.k.base + at_page * p.k.page + at_token * p.k.token + share.kv_head * p.k.head;
      const uint8_t* v = p.v.base + at_page * p.v.page + at_token * p.v.token + share.kv_head * p.v.head;
      const int bytes = row >= first && row < end ? 16 : 0;
#pragma unroll
      for (int c = 0; c < kChunks; c += kLanes) {
        const int chunk = c + lane % kLanes;
        copy16(slot.k + Rows<kHeadDim>::offset(row, chunk), k + 16 * chunk, bytes);
        copy16(slot.v + Rows<kHeadDim>::offset(row, chunk), v + 16 * chunk, bytes);
      }
    }
    const auto copy_descale = [&](float* to, const TokenDescale& of) {
      if (of.base == nullptr || lane >= kSlice) return;
      const uint8_t* from = of.base + own_page * of.page + token * of.token + share.kv_head * of.head;
      copy4(&to[lane], from, lane >= first && lane < end ? 4 : 0);
    };
    copy_descale(slot.k_descale, p.k_token);
    copy_descale(slot.v_descale, p.v_token);
    ++tile;
    step(p);
  }
};

}  // namespace fp8cutlass::decode
