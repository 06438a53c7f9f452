// Forms of a kernel for KV lengths with which every item has the same tiles, so that these need no loop.
#pragma once

#include <type_traits>
#include <utility>

namespace fp8cutlass::sm90 {

// The form for at most kMostKeys, which all have kTiles tiles. kMostKeys 0 stands for any length, in a loop.
template <int kMostKeys, int kTileN>
struct Unrolled {
  static constexpr int kTiles = (kMostKeys + kTileN - 1) / kTileN;
  static constexpr int kBefore = kMostKeys > 0 ? (kTiles - 1) * kTileN : 0;  // keys of all tiles but the last
  // Of the last one, that are multiplied; in the loop all of it is.
  static constexpr int kLastKeys = kMostKeys > 0 ? (kMostKeys - kBefore + 63) / 64 * 64 : kTileN;
  static_assert(kTiles != 1, "the first tile of an item is not its last");

  // Whether every row sees all keys of a tile, as far as that is known when this is compiled.
  static constexpr __device__ bool is_whole(int tile) { return kTiles > 0 && tile + 1 < kTiles; }
};

// lambda(0), lambda(1), ...: each number a type of its own, so that it is known when this is compiled.
template <class Lambda, int... kNumbers>
__device__ __forceinline__ void for_each(const Lambda& lambda, std::integer_sequence<int, kNumbers...>) {
  (lambda(std::integral_constant<int, kNumbers>()), ...);
}

}  // namespace fp8cutlass::sm90
