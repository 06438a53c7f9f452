// Keys for warpgroups: warps that read them from the cache into registers, turn them into f16, which is exact, and put
// them into shared memory as panels of wgmma.
#pragma once

#include "fp8cutlass/decode/stream.cuh"
#include "fp8cutlass/decode/tiles.cuh"

namespace fp8cutlass::decode {

// The shares of a CTA in shared memory, in their order: the one that is worked on, and the next ones. The first warp
// that converts finds them, a share ahead of its own keys.
template <int kRows, int kTile>
class ShareRing {
 public:
  static constexpr int kRing = 4;

  // By one thread. So many threads read each share.
  __device__ __forceinline__ void begin(const Cut& from, const Cut& to, int readers) {
    shares_ = Shares<kRows, kTile>(from, to), ring_[kRing - 1] = shares_.before(from);
    for (int i = 0; i < kRing; ++i) init(there_[i], 1), init(done_[i], readers);
  }

  // Finds share number `number`, when the one kRing before is done. By one thread.
  __device__ __forceinline__ void find(const Batch& b, int number) {
    struct {
      __device__ __forceinline__ Sequence at(const Batch& b, int s) const { return sequence_at(b, s); }
    } lengths;
    const int place = number % kRing;
    wait(done_[place], (number / kRing + 1) % 2);
    const Share& before = ring_[(number + kRing - 1) % kRing];
    Share& share = ring_[place];
    share.sequence = before.sequence, share.of = before.of;
    if (!shares_.next(b, lengths, share)) share.tiles = -1;
    arrive(there_[place]);
  }

  // Share number `number`: it has less than 0 tiles where there is none.
  __device__ __forceinline__ const Share& at(int number) {
    wait(there_[number % kRing], number / kRing % 2);
    return ring_[number % kRing];
  }

  // This thread does not need it any more.
  __device__ __forceinline__ void end(int number) { arrive(done_[number % kRing]); }

 private:
  Shares<kRows, kTile> shares_;
  Share ring_[kRing];
  Barrier there_[kRing], done_[kRing];
};

// 16 keys of K and V in a warp's registers. Eight lanes have two neighbouring keys and four chunks of each: in f16 no
// two of them meet in a bank.
template <int kHeadDim>
struct Held {
  static constexpr int kSets = kHeadDim / 64;  // of four chunks of 16 bytes
  uint4 k[2 * kSets], v[2 * kSets];
  float descale;  // of K of this lane's key in the first half of the warp, of V in the second

  __device__ __forceinline__ static int key(int i) {
    const int lane = threadIdx.x % 32;
    return lane / 4 % 2 + 2 * (lane / 8 / kSets) + 8 / kSets * i;
  }
  __device__ __forceinline__ static int chunk() { return threadIdx.x % 4; }             // of a set
  __device__ __forceinline__ static int set() { return threadIdx.x % 32 / 8 % kSets; }  // of this lane

  // Where this lane's first eight columns go in panels, if the slice begins at `row`, a multiple of 8.
  __device__ __forceinline__ static int place(int row) {
    return set() * kPanelBytes + panel_offset(row + key(0), 2 * chunk());
  }

  // Turns one of both into f16. The keys of a lane are 4 or 8 apart, so that chunks are swizzled in one of two ways.
  __device__ __forceinline__ static void to_panels(uint8_t* panels, int place, const uint4 (&x)[2 * kSets]) {
#pragma unroll
    for (int i = 0; i < 2 * kSets; ++i) {
      uint4 low, high;
      to_halves(low.x, low.y, x[i].x), to_halves(low.z, low.w, x[i].y);
      to_halves(high.x, high.y, x[i].z), to_halves(high.z, high.w, x[i].w);
      const int apart = 8 / kSets * i, at = place ^ apart % 8 * 16;
      *reinterpret_cast<uint4*>(panels + at + apart * kPanelPitch) = low;
      *reinterpret_cast<uint4*>(panels + (at ^ 16) + apart * kPanelPitch) = high;
    }
  }
};

// What a warp reads from the cache: 16 keys of each tile, tile after tile, share after share. Where the next ones of a
// share lie is looked up a slice ahead.
template <int kHeadDim, int kRows, int kWarps>
class Reader {
 public:
  static constexpr int kSlice = 16, kTile = kSlice * kWarps;

  __device__ __forceinline__ Reader(const DecodeParams& p, ShareRing<kRows, kTile>& ring) : ring_(ring) {
    if (finds()) ring_.find(p.batch, 0);
    go_on(p);
  }

  __device__ __forceinline__ bool more() const { return tiles_ > 0; }

  // Goes on to the next share that has tiles, where this one has no more. What was read has to be converted before:
  // this may wait for the end of a share.
  __device__ __forceinline__ void go_on(const DecodeParams& p) {
    if (tiles_ > 0) return;
    do {
      const Share& share = ring_.at(number_++);
      if (share.tiles < 0) return;
      tiles_ = share.tiles, head_ = share.kv_head, sequence_ = share.sequence, seen_ = share.seen;
      key_ = share.first_key + int(threadIdx.x) / 32 % kWarps * kSlice;
      ring_.end(number_ - 1);
      if (finds()) ring_.find(p.batch, number_);
      __syncwarp();
    } while (tiles_ == 0);
    look(p);
  }

  // Asks for the next slice. In the place of a key that no row of the unit sees, the nearest is read that one sees.
  __device__ __forceinline__ void load(const DecodeParams& p, Held<kHeadDim>& to) {
    delay_point(19);
    constexpr int kEach = 2 * Held<kHeadDim>::kSets;
    const int column = 16 * (4 * to.set() + to.chunk());
    if (together_) {  // all keys are of one page, one after the other
      const int page = clamped(__shfl_sync(~0u, page_, 0), 0, p.pages - 1);
      const int token = __shfl_sync(~0u, token_, 0) + to.key(0);
      const uint8_t *k = in_cache(p.k, page, token) + column, *v = in_cache(p.v, page, token) + column;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        to.k[i] = load16(k), to.v[i] = load16(v);
        k += steps(16 / kEach, p.k.token), v += steps(16 / kEach, p.v.token);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int page = clamped(__shfl_sync(~0u, page_, to.key(i)), 0, p.pages - 1);
        const int token = __shfl_sync(~0u, token_, to.key(i));
        to.k[i] = load16(in_cache(p.k, page, token) + column), to.v[i] = load16(in_cache(p.v, page, token) + column);
      }
    }
    const TokenDescale& of = threadIdx.x % 32 < kSlice ? p.k_token : p.v_token;
    if (of.base != nullptr)
      to.descale = *reinterpret_cast<const float*>(of.base + steps(clamped(page_, 0, p.pages - 1), of.page) +
                                                   steps(token_, of.token) + steps(head_, of.head));
    key_ += kTile;
    if (--tiles_ > 0) look(p);
  }

 private:
  __device__ __forceinline__ static bool finds() { return threadIdx.x == 32 * kWarps; }

  __device__ __forceinline__ const uint8_t* in_cache(const Cache& cache, int page, int token) const {
    return cache.base + steps(page, cache.page) + steps(token, cache.token) + steps(head_, cache.head);
  }

  // Where the keys of the next slice lie.
  __device__ __forceinline__ void look(const DecodeParams& p) {
    const int own = clamped(key_ + int(threadIdx.x) % kSlice, seen_.first, seen_.end - 1);
    const int entry = quotient(own, p.by_page_size);
    together_ = key_ >= seen_.first && key_ + kSlice <= seen_.end && p.by_page_size.by % kSlice == 0;
    token_ = own - entry * p.by_page_size.by;
    page_ =
        p.page_table == nullptr ? sequence_ : p.page_table[steps(sequence_, p.table_row) + min(entry, p.entries - 1)];
  }

  ShareRing<kRows, kTile>& ring_;
  int number_ = 0, tiles_ = 0;  // of the next share; of this one, those to come
  int key_ = 0, head_ = 0, sequence_ = 0;
  Keys seen_{};
  int page_ = 0, token_ = 0;  // of this lane's key
  bool together_ = false;
};

// Puts a warp's 16 of the 64 keys of tile number `number` into shared memory as f16.
template <int kHeadDim>
__device__ __forceinline__ void convert(const DecodeParams& p, int number, const Held<kHeadDim>& held,
                                        KeyTile<kHeadDim> (&tiles)[2], Handoff& handoff) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
  KeyTile<kHeadDim>& tile = tiles[number % 2];
  delay_point(25);
  wait(handoff.free[number % 2], (number / 2 + 1) % 2);
  if ((lane < 16 ? p.k_token : p.v_token).base != nullptr)
    (lane < 16 ? tile.k_descale : tile.v_descale)[row + lane % 16] = held.descale;
  const int place = held.place(row);
  held.to_panels(tile.k[0], place, held.k);
  held.to_panels(tile.v[0], place, held.v);
  fence_products();
  arrive(handoff.there[number % 2]);
}

}  // namespace fp8cutlass::decode
