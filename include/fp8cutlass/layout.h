// Where a byte of a tile lies in shared memory, and in which order packed V keeps its keys and columns.
// Usable on the host: tests/host proves that it is what CuTe makes of its swizzles, bijective and free of bank
// conflicts.
#pragma once

#include "fp8cutlass/host_device.h"

namespace fp8cutlass {

// A tile of kRows rows of kRowBytes bytes, read by ldmatrix (8 rows x 16 bytes at a time) and written in 16-byte
// chunks. Rows of 32, 64, 128 and 256 bytes are swizzled; 96-byte rows (head_dim 96) are padded to 112 = 7 chunks
// instead, because an odd number of chunks visits all eight 16-byte columns of the 128 bytes of banks in eight rows.
template <int kRows_, int kRowBytes_>
struct SmemTile {
  static constexpr int kRows = kRows_, kRowBytes = kRowBytes_;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr bool kSwizzled = (kRowBytes & (kRowBytes - 1)) == 0;
  static constexpr int kPitch = kSwizzled ? kRowBytes : kRowBytes + 16;
  static constexpr int kBytes = kRows * kPitch;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 96 || kRowBytes == 128 || kRowBytes == 256);

  // CuTe's Swizzle<B, 4, S>: B chunk bits are XORed with the B bits above the 128-byte line (above the row, if longer).
  static constexpr int kBits = !kSwizzled ? 0 : kRowBytes == 32 ? 1 : kRowBytes == 64 ? 2 : 3;
  static constexpr int kShift = kRowBytes == 256 ? 4 : 3;

  // By reference, as CuTe's: by value the compiler would add in another order, and the machine code of sm89 change.
  FP8_HOST_DEVICE static constexpr int swizzled(const int& byte) {
    return byte ^ ((byte & (((1 << kBits) - 1) << (4 + kShift))) >> kShift);
  }

  // Byte offset of 16-byte chunk `chunk` of row `row`.
  FP8_HOST_DEVICE static constexpr int offset(int row, int chunk) { return swizzled(row * kPitch + chunk * 16); }

  // offset(row + rows, chunk + 2 * step) from from = offset(row, chunk), for rows a multiple of 8 and chunk 0 or 1. The
  // XOR pattern repeats every 8 rows and chunk pairs only flip bits, so a lane keeps one offset and the rest are
  // immediates.
  FP8_HOST_DEVICE static constexpr int advance(int from, int rows, int step) {
    return (kSwizzled ? from ^ (step * 32) : from + step * 32) + rows * kPitch;
  }
};

// Packed V: position of key `key` inside its group of 16. A thread of the m16n8 accumulator owns columns 2t, 2t+1 of
// each 8-column block; the m16n8k32 A operand wants 4 consecutive positions 4t..4t+3. So positions 4t..4t+3 hold 2t,
// 2t+1, 8+2t, 9+2t.
FP8_HOST_DEVICE constexpr int packed_key(int key) {
  return (key & ~15) | (((key >> 1) & 3) << 2) | (((key >> 3) & 1) << 1) | (key & 1);
}

// Packed V: row of V^T that holds column `d`. Inside 32 columns, thread t of a quad then owns the neighbours
// 8t..8t+7.
FP8_HOST_DEVICE constexpr int packed_column(int d) {
  return (d & ~31) | (((d >> 1) & 3) << 3) | (((d >> 3) & 3) << 1) | (d & 1);
}

// A block of V on its way through shared memory, e4m3, kLanes lanes writing 8 neighbouring bytes each of a row, 64
// columns or fewer at a time; then lanes read 4 bytes of one row each, of 4 groups of 16 rows and 32 columns. Neither
// meets a bank twice: 32 bytes between groups set the four apart, and rows of 32, 64 and 128 bytes, of which several
// make the 128 bytes that half a warp writes, take turns in which half of their columns comes first.
template <int kRows, int kHeadDim, int kLanes>
struct TransposeStage {
  static constexpr int kGroupBytes = 16 * kHeadDim + 32;
  static constexpr int kBytes = kRows / 16 * kGroupBytes;
  static constexpr int kRowsPerLine = 128 % kHeadDim == 0 ? 128 / kHeadDim : 0;

  // Byte offset of column `column` in row `row` of the group that begins at row `group`.
  FP8_HOST_DEVICE static constexpr int offset(int group, int row, int column) {
    int flip = 0;
    if constexpr (kRowsPerLine > 0) flip = row / kRowsPerLine % 2 * (8 * kLanes);
    return group / 16 * kGroupBytes + row * kHeadDim + (column ^ flip);
  }
};

}  // namespace fp8cutlass
