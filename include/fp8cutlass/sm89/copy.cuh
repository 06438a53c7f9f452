// Global to shared memory with cp.async, shared memory to fragments with ldmatrix.
#pragma once

#include <cstdint>

#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/layout.h"
#include "fp8cutlass/sm89/instructions.cuh"

namespace fp8cutlass::sm89 {

// Copies a tile in 16-byte chunks; rows from `valid_rows` on become zeros and are not read (whatever lies behind a
// tensor, NaN bytes included, stays out). `row_stride` is in bytes. A thread keeps its chunk column and steps down
// whole rows.
template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile(uint8_t* smem, const uint8_t* gmem, int64_t row_stride, int valid_rows) {
  delay_point(11);
  // 6 chunks: 8 lanes, 2 idle.
  constexpr int kColumns = Tile::kRowChunks % 3 == 0 ? Tile::kRowChunks / 3 * 4 : Tile::kRowChunks;
  constexpr int kRowsPerPass = kThreads / kColumns;
  static_assert(kRowsPerPass % 8 == 0);
  hide_stride(row_stride);
  const int thread = thread_index(), row = thread / kColumns, chunk = thread % kColumns;
  if (kColumns != Tile::kRowChunks && chunk >= Tile::kRowChunks) return;
  const uint8_t* from = gmem + row * row_stride + chunk * 16;
  const int to = Tile::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < Tile::kRows; i += kRowsPerPass) {
    if (Tile::kRows % kRowsPerPass != 0 && row + i >= Tile::kRows) break;
    copy16(smem + Tile::advance(to, i, 0), from, row + i < valid_rows);
    from += kRowsPerPass * row_stride;
  }
}

// `count` floats (a multiple of 4) for the per-token K descales of a tile.
template <int kCount>
__device__ __forceinline__ void load_floats(float* smem, const float* gmem) {
  static_assert(kCount % 4 == 0);
  delay_point(12);
  const int thread = thread_index();
  if (thread < kCount / 4)
    copy16(reinterpret_cast<uint4*>(smem) + thread, reinterpret_cast<const uint4*>(gmem) + thread);
}

// A operands of m16n8k32: 16 rows x 32 bytes at (rows, step) from lane_offset_a(row).
template <class Tile>
__device__ __forceinline__ int lane_offset_a(int row) {
  const int lane = thread_index() % 32;
  return Tile::offset(row + lane % 16, lane / 16);
}
template <class Tile>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const uint8_t* smem, int lane_offset, int rows, int step) {
  load_matrices(a, smem + Tile::advance(lane_offset, rows, step));
}

// B operands of two neighbouring n8 blocks (16 rows at `rows`): b[0..1] of the first, b[2..3] of the second.
template <class Tile>
__device__ __forceinline__ int lane_offset_b() {
  const int lane = thread_index() % 32;
  return Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class Tile>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const uint8_t* smem, int lane_offset, int rows, int step) {
  load_matrices(b, smem + Tile::advance(lane_offset, rows, step));
}

}  // namespace fp8cutlass::sm89
