// Operands of wgmma in shared memory: where TMA puts a byte, and what the matrix descriptors say about it.
#pragma once

#include <cstdint>

#include "fp8cutlass/host_device.h"

namespace fp8cutlass::sm90 {

// Bytes of a row that lie together: the width of the copy engine's swizzle.
FP8_HOST_DEVICE constexpr int swizzle_width(int row_bytes) {
  return row_bytes % 128 == 0 || row_bytes == 96 ? 128 : 64;
}

// kRows rows of kRowBytes bytes, K-major, cut into blocks as wide as the swizzle: block b holds bytes
// [b * kWidth, (b + 1) * kWidth) of all rows, one row after the other. 96-byte rows (head_dim 96) lie in 128 bytes, of
// which TMA fills the last 32 with zeros and nobody reads them.
template <int kRows_, int kRowBytes_>
struct OperandTile {
  static constexpr int kRows = kRows_, kRowBytes = kRowBytes_;
  static constexpr int kWidth = swizzle_width(kRowBytes);
  static constexpr int kBlocks = (kRowBytes + kWidth - 1) / kWidth;
  static constexpr int kBlockBytes = kRows * kWidth;
  static constexpr int kBytes = kBlocks * kBlockBytes;
  static constexpr int kSteps = kRowBytes / 32;  // k32 steps of a product over the rows' bytes
  static_assert(kRowBytes % 64 == 0 || kRowBytes == 96, "rows are whole swizzle widths");
  static_assert(kRows % 8 == 0, "a swizzle pattern is 8 rows");

  // The lower half of the descriptor of a tile at this shared-memory address. It counts in 16 bytes, and whatever is
  // added to reach other rows, steps or tiles stays inside it: the upper half is a constant.
  FP8_HOST_DEVICE static constexpr uint32_t descriptor(uint32_t address) { return address >> 4 | 1u << 16; }

  // From the descriptor of row 0 to that of `row` (a multiple of 8), k step `step`.
  FP8_HOST_DEVICE static constexpr uint32_t advance(int row, int step) {
    constexpr int kStepsPerBlock = kWidth / 32;
    return (step / kStepsPerBlock * kBlockBytes + row * kWidth + step % kStepsPerBlock * 32) / 16;
  }

  // Where in a tile a byte of a row lies: groups of 16 bytes change places as the copy engine's swizzle says.
  FP8_HOST_DEVICE static constexpr int offset(int row, int byte) {
    const int plain = row * kWidth + byte % kWidth;
    return byte / kWidth * kBlockBytes + (plain ^ (plain >> 7 & (kWidth / 16 - 1)) << 4);
  }

  // Where group `i` of 16 bytes lies that is `i` groups behind the one at `begin` = offset(row, byte), where the byte's
  // group is a multiple of kGroups: one instruction where the swizzle lets them change places among themselves.
  template <int kGroups>
  FP8_HOST_DEVICE static constexpr int behind(int begin, int row, int byte, int i) {
    constexpr bool kAmongThemselves = (kGroups & (kGroups - 1)) == 0 && kGroups <= kWidth / 16;
    return kAmongThemselves ? begin ^ 16 * i : offset(row, byte + 16 * i);
  }

  // With the upper half: swizzle mode, and 8 rows from pattern to pattern.
  FP8_HOST_DEVICE static constexpr uint64_t complete(uint32_t lower) {
    constexpr uint32_t kSwizzleMode = kWidth == 128 ? 1 : 2;
    return uint64_t(8 * kWidth / 16 | kSwizzleMode << 30) << 32 | lower;
  }
};

}  // namespace fp8cutlass::sm90
