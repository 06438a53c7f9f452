// Which keys a row of Q sees, and which tiles of keys a tile of rows visits. Host-callable.
#pragma once

#include "fp8cutlass/host_device.h"
#include "fp8cutlass/params.h"

namespace fp8cutlass {

FP8_HOST_DEVICE constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }

// On the device an instruction that adds and compares at once.
FP8_HOST_DEVICE int smaller(int a, int b) {
#ifdef __CUDA_ARCH__
  return min(a, b);
#else
  return a < b ? a : b;
#endif
}

// full: a row sees all keys. causal: those up to a diagonal. window: those between two diagonals. blocks: what lists
// of tiles and bits say (walk/listed.h).
enum class Mask { full, causal, window, blocks };

// Row i sees the keys i + first to i + last. `last` is read of masks with a diagonal, `first` of windows.
struct Band {
  int first, last;
};

FP8_HOST_DEVICE Band band_of(const ForwardParams& p) { return {p.window_offset, p.causal_offset}; }

struct Tiles {
  int first, count;
};

// The tiles that rows `row` to `rows_end` - 1 visit, of a sequence of `keys` keys. There is at least one, all of it
// masked if need be, so that a row without keys is no special case.
template <int kTileN, Mask kMask>
FP8_HOST_DEVICE Tiles tiles_of(int row, int rows_end, int64_t keys, Band band) {
  if (kMask != Mask::full) {
    const int64_t visible = int64_t(rows_end) + band.last;  // one past the last key that the last row sees
    keys = visible < keys ? visible : keys;
  }
  const int end = keys < 1 ? 1 : ceil_div(int(keys), kTileN);
  if (kMask != Mask::window) return {0, end};
  const int64_t begin = int64_t(row) + band.first;  // the first key that the first row sees
  const int first = begin <= 0 ? 0 : begin / kTileN < end ? int(begin / kTileN) : end - 1;
  return {first, end - first};
}

// Whether one of the rows from `row` on does not see all keys of a tile. Not for windows, which have two ends.
template <int kTileN, int kRows, Mask kMask>
FP8_HOST_DEVICE bool is_masked(int row, int keys, Band band, int tile, int tile_keys = kTileN) {
  int last = keys - 1;  // that the first row sees
  if (kMask != Mask::full) last = smaller(last, row + band.last);
  return last < tile * kTileN + tile_keys - 1;
}

// What hides keys of a tile from a row of a window, where more than one may.
enum : int { kAfterBand = 1, kBeforeBand = 2, kPastKeys = 4 };

// All of that for the rows `row` to `row` + kRows - 1.
template <int kTileN, int kRows>
FP8_HOST_DEVICE int masked_ends(int row, int keys, Band band, int tile) {
  const int first_key = tile * kTileN, last_key = first_key + kTileN - 1;
  return kAfterBand * int(row + band.last < last_key) + kBeforeBand * int(row + kRows - 1 + band.first > first_key) +
         kPastKeys * int(keys - 1 < last_key);
}

}  // namespace fp8cutlass
