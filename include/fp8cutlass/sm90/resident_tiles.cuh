// The numbers of a kernel of resident.cuh, what lies in its shared memory, and its warpgroup instructions.
#pragma once

#include <cstdint>

#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/operand.h"
#include "fp8cutlass/sm90/wgmma.cuh"

namespace fp8cutlass::sm90 {

// For the LSE, a lane's part of the unquantised exponentials of its two rows, of the row tile and of the tile of keys:
// here, as registers are few.
struct ExactSums {
  float2 item, tile;
};

// A head of K and V of a sequence of a ragged batch, with row tiles of the query heads that share it: an item of a CTA.
struct alignas(16) ResidentSequence {
  int query, rows;  // the sequence's first token of Q, and how many it has
  int key, keys;    // of K and V
  int kv_head;
  int first_tile;            // the number of its first tile of keys, among those of the CTA
  int first_row, row_tiles;  // row tiles: the first one, and how many; 0: there is no item any more
};

// The numbers of a kernel: kMostKeys keys at most, kWarpgroups that multiply, kSlots tiles of K and V in e4m3, kStages
// blocks in 16 bits.
template <int kHeadDim_, int kMostKeys_, int kWarpgroups_, int kSlots_, int kStages_>
struct Resident {
  static constexpr int kHeadDim = kHeadDim_, kMostKeys = kMostKeys_, kWarpgroups = kWarpgroups_;
  static constexpr int kSlots = kSlots_, kStages = kStages_;
  static constexpr int kMultiplying = 128 * kWarpgroups, kThreads = kMultiplying + 128;
  static constexpr int kRows = 64;                                  // of a row tile, a warpgroup's
  static constexpr int kTileN = kMostKeys < 128 ? kMostKeys : 128;  // keys of a tile, and of a block descale
  static constexpr int kTiles = kMostKeys / kTileN;
  static_assert(kMostKeys % kTileN == 0 && kTileN % 64 == 0 && (kHeadDim == 64 || kHeadDim == 128));
  static_assert(kSlots >= kTiles, "a row tile goes over all keys of its head");
  // O, P V and P of several tiles do not fit the registers at head_dim 128: P V is made in two parts.
  static constexpr int kParts = kTiles > 1 && kHeadDim == 128 ? 2 : 1;
  static constexpr int kPartColumns = kHeadDim / kParts;

  // See resident_convert.cuh.
  static constexpr int kLanes = kHeadDim / 16, kRowStep = 128 / kLanes;
  static constexpr int kPasses = kTileN / kRowStep, kQueryPasses = kRows / kRowStep;
  static constexpr int kGroups = kTileN / 16, kTasks = kHeadDim / 64 * kGroups / 4;

  // Whether the registers hold a block of K and one of V.
  static constexpr bool kBoth = 8 * kPasses + 16 * kTasks <= 64;
  static_assert(!kBoth || kStages >= 2);

  // Items of a ragged batch that may be told of: those with a tile in a slot or on its way, the one that is converted,
  // and the next. So nobody waits for one that has yet to be converted.
  static constexpr int kTold = 16;
  static_assert(kTold >= kSlots + kStages / 2 + 3);

  using QTile = OperandTile<kRows, kHeadDim>;
  using KTile = OperandTile<kTileN, kHeadDim>;
  using VTile = OperandTile<kHeadDim + 8, kTileN>;  // V^T: the columns of the first part, 8 rows of ones, the others
  using QuerySource = OperandTile<kRows, 2 * kHeadDim>;
  using KeySource = OperandTile<kTileN, 2 * kHeadDim>;  // a block of K or of V
  static constexpr int kVBytes = (VTile::kBytes + 1023) / 1024 * 1024;
  // Where a row of packed V^T lies in it, and where its ones do.
  static constexpr __host__ __device__ int value_row(int row) { return row < kPartColumns ? row : row + 8; }

  struct Storage {
    alignas(1024) uint8_t q[kWarpgroups][QTile::kBytes];
    alignas(1024) uint8_t k[kSlots][KTile::kBytes];
    alignas(1024) uint8_t v[kSlots][kVBytes];
    alignas(1024) uint8_t query_source[kWarpgroups][QuerySource::kBytes];
    alignas(1024) uint8_t key_source[kStages][KeySource::kBytes];
    ExactSums exact[kMultiplying];
    float slope[kWarpgroups][kRows];  // softmax scale times Q's descale, as codes a score unit of K's descale
    float2 descale[kSlots];           // of K and of V
    uint32_t largest[2][2][4];        // of this tile and the next, of K and of V, of each warp that converts
    Barrier query_full[kWarpgroups], source_full[kStages];
    Barrier there[kSlots], free[kSlots];  // a tile of K and V
    ResidentSequence sequences[kTold];
    Barrier told[kTold], read[kTold];  // one of these
    int2 ahead[kWarpgroups];           // where the next row tile is, as one thread of a warpgroup found it
  };

  // Tile number n of a CTA, counted over its items: its slot, and how often that was filled before.
  static __device__ __forceinline__ int slot_of(int n) { return unsigned(n) % kSlots; }
  static __device__ __forceinline__ int round_of(int n) { return unsigned(n) / kSlots; }
};

// The warpgroup instructions of a kernel.
template <int kKeys>
struct ScoresOf;
template <>
struct ScoresOf<64> {
  using Gmma = cute::SM90::GMMA::MMA_64x64x32_F16E4M3E4M3_SS_TN<>;
};
template <>
struct ScoresOf<128> {
  using Gmma = cute::SM90::GMMA::MMA_64x128x32_F16E4M3E4M3_SS_TN<>;
};
template <int kColumns>
struct ValuesOf;
template <>
struct ValuesOf<64> {
  using Ones = ValuesWithOnes<64, ValueType::E4M3>;
  using Rest = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ValuesOf<128> {
  using Ones = ValuesWithOnes<128, ValueType::E4M3>;
};

}  // namespace fp8cutlass::sm90
