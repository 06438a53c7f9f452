// Packs a boolean mask: bits in the order of accumulators, and the list of the tiles that each tile of rows visits.
//
// A CTA makes one list, a warp of it a tile of 128 rows and 128 keys at a time. A lane reads 16 keys of a row, eight
// lanes a row of the tile. So a warp reads whole rows of 128 bytes, and exchanges bits among eight lanes.
#pragma once

#include "fp8cutlass/mask/params.h"
#include "fp8cutlass/walk/tile_mask.h"

namespace fp8cutlass::masking {

constexpr int kLaneKeys = 16, kRowLanes = kMaskTile / kLaneKeys;
constexpr int kReadRows = 32 / kRowLanes;  // of a warp at a time

enum Flag : uint8_t { kSkipped, kWhole, kInPart };

// Of four bytes, which are not 0, in bits 0 to 3.
__device__ __forceinline__ uint32_t nonzero(uint32_t x) {
  const uint32_t high = ((x & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | x;  // bit 7 of each byte
  return ((high >> 7 & 0x01010101u) * 0x10204080u) >> 28;
}

// 16 keys of a row from `key` on, a byte each, read kWord bytes at a time; 0 for those that there are not. `columns` is
// a multiple of kWord.
template <int kWord>
__device__ __forceinline__ uint4 read_keys(const PackMaskParams& p, const uint8_t* row, int key, int columns) {
  if constexpr (kWord == 16) {
    return key < columns ? *reinterpret_cast<const uint4*>(row + key) : make_uint4(0, 0, 0, 0);
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = key + 4 * i;
      if constexpr (kWord == 4) {
        if (first < columns) words[i] = *reinterpret_cast<const uint32_t*>(row + first);
      } else {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
          if (first + byte < columns) words[i] |= uint32_t(row[(first + byte) * p.stride_column]) << 8 * byte;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// A row's word of bits for one of the four lanes of a quad: lane l of eight gets that of lane 2 (l & 1) + (l >> 1 & 1).
__device__ __forceinline__ uint32_t exchange(const uint4& keys, int lane) {
  const uint32_t bits[4] = {nonzero(keys.x), nonzero(keys.y), nonzero(keys.z), nonzero(keys.w)};
  // Keys 2 q and 2 q + 1 of both blocks of 8, at the place of these blocks in the word.
  const int place = 4 * (lane % kRowLanes);
  const uint32_t of[4] = {((bits[0] & 3) | (bits[2] & 3) << 2) << place, (bits[0] >> 2 | bits[2] >> 2 << 2) << place,
                          ((bits[1] & 3) | (bits[3] & 3) << 2) << place, (bits[1] >> 2 | bits[3] >> 2 << 2) << place};
  const bool upper = lane & 1, second = lane & 2;
  uint32_t first_kept = upper ? of[2] : of[0], second_kept = upper ? of[3] : of[1];
  first_kept |= __shfl_xor_sync(~0u, upper ? of[0] : of[2], 1);
  second_kept |= __shfl_xor_sync(~0u, upper ? of[1] : of[3], 1);
  uint32_t word = second ? second_kept : first_kept;
  word |= __shfl_xor_sync(~0u, second ? first_kept : second_kept, 2);
  return word | __shfl_xor_sync(~0u, word, 4);
}

// The bits of a word for lane `quad` of a quad that stand for keys from `keys` of the tile on.
__device__ __forceinline__ uint32_t bits_from(int keys, int quad) {
  const auto before = [](int n) { return n < 16 ? (1u << 2 * n) - 1 : ~0u; };  // of n blocks of 8 keys
  const int from_here = max(keys + 7 - 2 * quad, 0);
  return ~((before(from_here / 8) & 0x55555555u) | (before(max(from_here - 1, 0) / 8) & 0xAAAAAAAAu));
}

// One tile of a list. All lanes of a warp come here.
template <int kWord>
__device__ __forceinline__ Flag pack_tile(const PackMaskParams& p, const uint8_t* mask, int row_tile, int tile,
                                          uint32_t* to) {
  const int lane = threadIdx.x % 32, row_of_read = lane / kRowLanes, chunk = lane % kRowLanes;
  const int quad = 2 * (lane & 1) + (lane >> 1 & 1);
  const int rows = p.rows == 1 ? kMaskTile : min(p.rows - row_tile * kMaskTile, kMaskTile);
  const int columns = p.columns == 1 ? kMaskTile : p.columns, key = tile * kMaskTile + chunk * kLaneKeys;
  const uint32_t past = p.columns == 1 ? 0 : bits_from(min(p.columns - tile * kMaskTile, kMaskTile), quad);
  const uint8_t* const first_row = mask + int64_t(row_tile) * kMaskTile * p.stride_row;
  bool some = false, all = true;
#pragma unroll(kWord == 1 ? 1 : 2)
  for (int warp = 0; warp < kMaskTile / 16; ++warp) {
    uint4 keys[4];  // rows 0, 8, 4 and 12 of the warp's 16, and the next ones
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + kReadRows * (i / 2) + 8 * (i % 2) + row_of_read;
      keys[i] = row < rows ? read_keys<kWord>(p, first_row + row * p.stride_row, key, columns) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 words = make_uint2(exchange(keys[2 * i], lane), exchange(keys[2 * i + 1], lane));
      const int group = kReadRows * i + row_of_read, row = 16 * warp + group;
      if (chunk < 4) reinterpret_cast<uint2*>(to)[(8 * warp + group) * 4 + quad] = words;
      some = some || (words.x | words.y) != 0;
      all = all && (row >= rows || (words.x | past) == ~0u) && (row + 8 >= rows || (words.y | past) == ~0u);
    }
  }
  if (__all_sync(~0u, all)) return kWhole;
  return __any_sync(~0u, some) ? kInPart : kSkipped;
}

// The list of blockIdx.x. `flags` has a byte for each of p.bit_tiles.
__device__ __forceinline__ void pack_list(const PackMaskParams& p, uint8_t* flags) {
  const int64_t list = blockIdx.x;
  const int row_tile = list % p.row_tiles, pair = list / p.row_tiles;
  const uint8_t* const mask = p.seen + pair / p.heads * p.stride_batch + pair % p.heads * p.stride_head;
  constexpr int kWarps = kMaskThreads / 32;
  for (int tile = threadIdx.x / 32; tile < p.bit_tiles; tile += kWarps) {
    uint32_t* const to = p.bits + (list * p.bit_tiles + tile) * kMaskTileWords;
    const Flag flag = p.word == 16  ? pack_tile<16>(p, mask, row_tile, tile, to)
                      : p.word == 4 ? pack_tile<4>(p, mask, row_tile, tile, to)
                                    : pack_tile<1>(p, mask, row_tile, tile, to);
    if (threadIdx.x % 32 == 0) flags[tile] = flag;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int* const entries = p.tiles + list * p.key_tiles;
  int count = 0;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int tile = first + threadIdx.x;
    const uint8_t flag = tile < p.key_tiles ? flags[p.bit_tiles > 1 ? tile : 0] : uint8_t(kSkipped);
    const unsigned visited = __ballot_sync(~0u, flag != kSkipped);
    if (flag != kSkipped) entries[count + __popc(visited & ((1u << threadIdx.x) - 1))] = 2 * tile + (flag == kInPart);
    count += __popc(visited);
  }
  __syncwarp();
  for (int place = count + threadIdx.x; place < p.key_tiles; place += 32) entries[place] = 0;
  if (threadIdx.x == 0) p.counts[list] = count;
}

}  // namespace fp8cutlass::masking
