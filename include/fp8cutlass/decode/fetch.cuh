// Copies the keys of one warp's slices from the cache to shared memory, some slices ahead of the products. Where keys
// lie is looked up as many slices ahead of that: what a thread loads comes behind all copies that were asked for
// before.
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

// Where the keys of a slice lie, and what of it is read: keys from `first` to before `end`.
template <int kSlice>
struct alignas(16) Places {
  struct Place {
    int page, token;
  } of[kSlice];
  int kv_head, first, end, unused;  // kv_head -1: there is no slice
};

template <int kRows, int kSlice, int kWarps>
struct Fetcher {
  static constexpr int kTile = kSlice * kWarps;

  Shares<kRows, kTile> shares;
  Share share{};  // of less than 0 tiles: there is none any more
  int tile = 0;   // of the share, the next one to look up

  __device__ __forceinline__ Fetcher(const Cut& from, const Cut& to) : shares(from, to) {}

  // With the first share, where there is one, and what gives those after it.
  __device__ __forceinline__ void begin(bool any, const Share& first, const Shares<kRows, kTile>& after) {
    shares.begin = after.begin, share = first;
    if (!any) share.tiles = -1;
  }

  // Keys whose page is looked up once: pages of engines are multiples of 16 tokens, or of one.
  static constexpr int kBlock = 16;

  __device__ __forceinline__ static bool by_blocks(const DecodeParams& p) { return p.by_page_size.by % kBlock == 0; }

  // Looks up the next slice. The pages are there when what was copied until then is.
  __device__ __forceinline__ void look(const DecodeParams& p, const Sequences& sequences, Places<kSlice>& places) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // all are done with what lay there
    while (share.tiles >= 0 && tile >= share.tiles) {
      tile = 0;
      if (!shares.next(p.batch, sequences, share)) share.tiles = -1;
    }
    if (share.tiles < 0) {
      if (lane == 0) places.kv_head = -1;
      return;
    }
    const int key = share.first_key + tile * kTile + int(threadIdx.x) / 32 * kSlice;
    if (lane < kSlice && (lane % kBlock == 0 || !by_blocks(p))) {
      const int own = key + lane, entry = quotient(own, p.by_page_size);
      places.of[lane].token = own - entry * p.by_page_size.by;
      if (p.page_table == nullptr) {
        places.of[lane].page = share.sequence;
      } else {
        copy4(&places.of[lane].page, p.page_table + steps(share.sequence, p.table_row) + min(entry, p.entries - 1), 4);
      }
    }
    if (lane == 0)
      places.kv_head = share.kv_head, places.first = share.seen.first - key, places.end = share.seen.end - key;
    ++tile;
  }

  // Issues the copies of a slice that was looked up. Keys that no row of the unit sees are zeros and are not read.
  template <int kHeadDim>
  __device__ __forceinline__ static void load(const DecodeParams& p, const Places<kSlice>& places,
                                              Slot<kHeadDim, kSlice>& slot) {
    const int head = places.kv_head, first = places.first, end = places.end;
    if (head < 0) return;
    delay_point(19);
    constexpr int kChunks = kHeadDim / 16;
    constexpr int kLanes = kChunks > 8 ? kChunks % 8 == 0 ? 8 : 4 : kChunks % 4 == 0 ? kChunks : 2;  // of a key
    constexpr int kKeys = 32 / kLanes;                                                               // at a time
    const int lane = threadIdx.x % 32, own_row = lane / kLanes, own_chunk = lane % kLanes;
    // Copies of the row that is `i` after this lane's first one.
    const auto copy_row = [&](int i, const uint8_t* k, const uint8_t* v) {
      const int bytes = unsigned(own_row + i - first) < unsigned(end - first) ? 16 : 0;
#pragma unroll
      for (int c = 0; c < kChunks; c += kLanes) {
        const int to = Rows<kHeadDim>::offset(own_row + i % 8, own_chunk + c) + (i - i % 8) * Rows<kHeadDim>::kPitch;
        copy16(slot.k + to, k + 16 * c, bytes);
        copy16(slot.v + to, v + 16 * c, bytes);
      }
    };
    const auto in_cache = [&](const Cache& cache, int page, int token) {
      return cache.base + steps(page, cache.page) + steps(token, cache.token) + steps(head, cache.head) +
             16 * own_chunk;
    };
    if (by_blocks(p)) {
#pragma unroll
      for (int block = 0; block < kSlice; block += kBlock) {
        const auto at = places.of[block];
        const int page = clamped(at.page, 0, p.pages - 1), token = at.token + own_row;
        const uint8_t *k = in_cache(p.k, page, token), *v = in_cache(p.v, page, token);
#pragma unroll
        for (int i = 0; i < kBlock; i += kKeys)
          copy_row(block + i, k, v), k += steps(kKeys, p.k.token), v += steps(kKeys, p.v.token);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kSlice; i += kKeys) {
        const auto at = places.of[own_row + i];
        const int page = clamped(at.page, 0, p.pages - 1);
        copy_row(i, in_cache(p.k, page, at.token), in_cache(p.v, page, at.token));
      }
    }
    const auto copy_descale = [&](float* to, const TokenDescale& of) {
      if (of.base == nullptr || lane >= kSlice) return;
      const int place = by_blocks(p) ? lane / kBlock * kBlock : lane, token = places.of[place].token + lane - place;
      const int page = clamped(places.of[place].page, 0, p.pages - 1);
      const uint8_t* from = of.base + steps(page, of.page) + steps(token, of.token) + steps(head, of.head);
      copy4(&to[lane], from, lane >= first && lane < end ? 4 : 0);
    };
    copy_descale(slot.k_descale, p.k_token);
    copy_descale(slot.v_descale, p.v_token);
  }
};

}  // namespace fp8cutlass::decode
