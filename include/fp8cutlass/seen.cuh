// What a row sees of a tile of keys, as bits: bit 2 n + c of a lane's word stands for key 8 n + 2 (lane % 4) + c of the
// tile. A lane has one word for each of its two rows.
#pragma once

#include <cmath>

#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/walk/tile_mask.h"

namespace fp8cutlass {

// The bits of the tile's first `keys` keys.
__device__ __forceinline__ uint32_t bits_before(int keys) {
  const unsigned from_here = keys + 7 - 2 * (threadIdx.x % 4);
  const auto blocks = [](unsigned n) { return n < 16 ? (1u << 2 * n) - 1 : ~0u; };  // bits of n blocks of 8 keys
  return (blocks(from_here / 8) & 0x55555555u) | (blocks((from_here - 1) / 8) & 0xAAAAAAAAu);
}

// Of a visit (walk/listed.h), for thread `thread` of two warpgroups.
__device__ __forceinline__ uint2 seen_bits(const TileMask& mask, int visit, int keys, int thread) {
  uint2 seen = make_uint2(~0u, ~0u);
  if (visit == kSeenWhole) return seen;
  if (visit == kHidden) return make_uint2(0, 0);
  if (visit & kSeenInPart) {
    const int64_t place = unsigned(visit) / kVisitFlags;
    seen = *reinterpret_cast<const uint2*>(mask.bits + place * kMaskTileWords + 2 * thread);
  }
  if (visit & kCut) {
    const uint32_t before = bits_before(unsigned(keys) % kMaskTile);
    seen.x &= before, seen.y &= before;
  }
  return seen;
}

// The same of part `part` of a tile, kKeys keys wide, for the 16 rows of a warp from `row` of the tile on.
template <int kKeys>
__device__ __forceinline__ uint2 seen_bits(const uint32_t* bits, int row, int part) {
  const int thread = row / 16 * 32 + threadIdx.x % 32, first = part % (kMaskTile / kKeys) * (kKeys / 4);
  const uint2 seen = *reinterpret_cast<const uint2*>(bits + 2 * thread);
  return make_uint2(seen.x >> first, seen.y >> first);
}

__device__ __forceinline__ bool sees_all(const uint2& seen) { return (seen.x & seen.y) == ~0u; }

// The same of a tile that is two of a list's.
struct SeenPair {
  uint2 half[2];
};

__device__ __forceinline__ bool sees_all(const SeenPair& seen) {
  return (seen.half[0].x & seen.half[0].y & seen.half[1].x & seen.half[1].y) == ~0u;
}

// Scores of keys that are not seen become -inf.
template <class Score, int kBlocks>
__device__ __forceinline__ void mask_unseen(Score (&s)[kBlocks][4], const uint2& seen) {
  static_assert(kBlocks <= kMaskTile / 8);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (((i < 2 ? seen.x : seen.y) >> (2 * n + i % 2) & 1) == 0) s[n][i] = kHiddenScore<Score>;
}

// The same of f16 scores: a bit comes to the sign of a byte, which a permutation spreads over a half.
template <int kFirst = 0, int kBlocks>
__device__ __forceinline__ void mask_unseen(uint32_t (&s)[kBlocks][2], const uint2& seen) {
  static_assert(kFirst % (kMaskTile / 8) == 0 && kFirst < kBlocks && kBlocks % 4 == 0);
  constexpr int kBytes = kBlocks < kMaskTile / 8 ? kBlocks / 4 : 4;
  const uint32_t unseen[2] = {~seen.x, ~seen.y};
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t first = unseen[r] << (7 - 2 * i), second = unseen[r] << (6 - 2 * i);
#pragma unroll
      for (int byte = 0; byte < kBytes; ++byte) {
        uint32_t& pair = s[kFirst + 4 * byte + i][r];
        pair = hide(pair, signs_of_bytes(first, second, 0xCC88 + 0x1111 * byte));
      }
    }
}

template <int kBlocks>
__device__ __forceinline__ void mask_unseen(uint32_t (&s)[kBlocks][2], const SeenPair& seen) {
  mask_unseen<0>(s, seen.half[0]);
  mask_unseen<kMaskTile / 8>(s, seen.half[1]);
}

}  // namespace fp8cutlass
