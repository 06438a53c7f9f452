// How rows of K and V lie in shared memory. Eight neighbouring keys have any one 16-byte chunk in different banks, so
// that ldmatrix reads them at once.
#pragma once

#include "fp8cutlass/host_device.h"

namespace fp8cutlass::decode {

template <int kHeadDim>
struct Rows {
  static constexpr int kChunks = kHeadDim / 16;
  // Numbers of chunks that are powers of two are swizzled, others padded to an odd one.
  static constexpr bool kSwizzled = (kChunks & (kChunks - 1)) == 0;
  static constexpr int kPitch = 16 * (kSwizzled ? kChunks : kChunks | 1);
  static constexpr int kKeysTogether = kChunks >= 8 ? 1 : 8 / kChunks;  // keys in 128 bytes
  static constexpr int kMask = (kChunks >= 8 ? 8 : kChunks) - 1;

  FP8_HOST_DEVICE static constexpr int offset(int key, int chunk) {
    return key * kPitch + 16 * (kSwizzled ? chunk ^ (key / kKeysTogether & kMask) : chunk);
  }
};

// Q in f16: lane (g, t) of a warp reads elements 4t to 4t + 3 of row g, 8 bytes, a half warp at a time.
template <int kHeadDim>
constexpr int kQueryPitch = (2 * kHeadDim + 127) / 128 * 128 + 32;

// O in float32: lane (g, t) adds two elements at 2g of rows 2t and 2t + 1.
template <int kHeadDim>
constexpr int kResultPitch = kHeadDim + 4;  // floats

// Units of so many rows are multiplied by warpgroups, from f16 in shared memory: 64 keys at a time, in panels of 64
// columns. A panel is what a matrix descriptor describes: rows of 128 bytes, whose 16-byte chunks are swizzled.
constexpr int kWideRows = 64, kGroupKeys = 64;  // rows of a unit; keys that a warpgroup takes at a time
constexpr int kPanelPitch = 128, kPanelBytes = 64 * kPanelPitch;

FP8_HOST_DEVICE constexpr int panel_offset(int row, int chunk) { return row * kPanelPitch + 16 * (chunk ^ row % 8); }

}  // namespace fp8cutlass::decode
