// K, V and Q on their way from 16 bits in shared memory, where the copy engine put them, to the e4m3 tiles that wgmma
// reads: part of resident.cuh, whose Resident<...> is R here. A warpgroup takes a block of 128 keys of K or of V, or 64
// rows of Q. It holds them in registers between the maximum and the conversion. The bits are those of pack.cuh.
#pragma once

#include <cstdint>

#include "fp8cutlass/layout.h"
#include "fp8cutlass/pack.cuh"
#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/convert.cuh"

namespace fp8cutlass::sm90 {

// The threads of this one's warpgroup.
__device__ __forceinline__ void sync_warpgroup() {
  delay_point(18);
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

// K and Q: a row belongs to kLanes neighbouring lanes, two chunks of 8 elements to each. Rows take their chunks in one
// order or the other, so that those of an access do not meet in a bank: neighbours where two rows are read at once,
// and those whose bytes go to another line of 128 bytes.
template <class R>
struct RowLane {
  int lane, first, order;
  __device__ __forceinline__ RowLane() {
    const int thread = thread_index() % 128;
    lane = thread % R::kLanes, first = thread / R::kLanes;
    order = (R::kHeadDim == 64 ? first ^ first / 2 : first) % 2;
  }
  __device__ __forceinline__ int column(int i) const { return 8 * (lane + R::kLanes * (i ^ order)); }
};

template <class R, class Block, int kPasses>
__device__ __forceinline__ void take_rows(uint4 (&x)[kPasses][2], const uint8_t* source) {
  const RowLane<R> at;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* const from =
        source + Block::offset(at.first, 2 * at.column(i));  // a step of rows is a multiple of 8
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      x[pass][i] = *reinterpret_cast<const uint4*>(from + pass * R::kRowStep * Block::kWidth);
  }
}

// Rows of a block of K from `keys` on are none of the sequence's.
template <class R>
__device__ __forceinline__ void clear_keys(uint4 (&x)[R::kPasses][2], int keys) {
  const RowLane<R> at;
#pragma unroll
  for (int pass = 0; pass < R::kPasses; ++pass) {
    if (at.first + pass * R::kRowStep < keys) continue;
    x[pass][0] = x[pass][1] = uint4{0, 0, 0, 0};
  }
}

// V: a lane has two columns of 16 keys, a warp 64 columns, for each of its kTasks. Lanes are given columns so that the
// eight of an access write rows of V^T whose swizzles differ: four by their columns, twice that as half of them write
// their second column first.
template <class R>
struct ColumnLane {
  int warp, pair;
  bool flip;
  __device__ __forceinline__ ColumnLane() {
    const int thread = thread_index() % 128, lane = thread % 32;
    warp = thread / 32;
    pair = (lane & 3) << 2 | (lane >> 2 & 3) | (lane & 16);
    flip = lane & 4;
  }
  __device__ __forceinline__ int set(int task) const { return (warp + 4 * task) / R::kGroups; }  // of 64 columns
  __device__ __forceinline__ int column(int task) const { return 64 * set(task) + 2 * pair; }
  __device__ __forceinline__ int key(int task) const { return 16 * ((warp + 4 * task) % R::kGroups); }
};

template <class R, class Block>
__device__ __forceinline__ void take_columns(uint4 (&x)[R::kTasks][4], const uint8_t* source) {
  static_assert(Block::kWidth == 128, "64 columns");
  const ColumnLane<R> at;
  int place[8];  // the swizzle repeats every 8 rows
#pragma unroll
  for (int t = 0; t < 8; ++t) place[t] = Block::offset(t, 4 * at.pair);
#pragma unroll
  for (int task = 0; task < R::kTasks; ++task) {
    const uint8_t* const from = source + at.set(task) * Block::kBlockBytes + at.key(task) * Block::kWidth;
    uint32_t word[16];
#pragma unroll
    for (int t = 0; t < 16; ++t)
      word[t] = *reinterpret_cast<const uint32_t*>(from + place[t % 8] + t / 8 * 8 * Block::kWidth);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[task][i] = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
  }
}

// The same of a block of V.
template <class R>
__device__ __forceinline__ void clear_values(uint4 (&x)[R::kTasks][4], int keys) {
  const ColumnLane<R> at;
#pragma unroll
  for (int task = 0; task < R::kTasks; ++task) {
    const int left = keys - at.key(task);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (left <= 4 * i) x[task][i].x = 0;
      if (left <= 4 * i + 1) x[task][i].y = 0;
      if (left <= 4 * i + 2) x[task][i].z = 0;
      if (left <= 4 * i + 3) x[task][i].w = 0;
    }
  }
}

// The scale of a block that a warpgroup holds: each warp tells its largest value, and when they have met, all find the
// scale.
template <class Source, int kPasses, int kChunks>
__device__ __forceinline__ void tell_largest(uint32_t (&of_warp)[4], uint4 (&x)[kPasses][kChunks]) {
  uint32_t largest[kPasses];
  magnitudes<Source>(largest, x);
  const uint32_t bits = __reduce_max_sync(~0u, packing::largest_of(largest));
  const int thread = thread_index();
  if (thread % 32 == 0) of_warp[thread / 32 % 4] = bits;
}
template <class Source>
__device__ __forceinline__ packing::Scale block_scale(const uint32_t (&of_warp)[4], float limit,
                                                      float limit_reciprocal) {
  const uint32_t bits = max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3]));
  return packing::scale_of(Source::low(bits), limit, limit_reciprocal);
}

// A block of K to its tile.
template <class R, class Source>
__device__ __forceinline__ void convert_keys(uint8_t* tile, uint4 (&x)[R::kPasses][2], float inverse) {
  const RowLane<R> at;
  uint8_t* const to[2] = {tile + R::KTile::offset(at.first, at.column(0)),
                          tile + R::KTile::offset(at.first, at.column(1))};  // a step of rows is a multiple of 8
#pragma unroll
  for (int pass = 0; pass < R::kPasses; ++pass) {
    packing::keep(x[pass]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint2*>(to[i] + pass * R::kRowStep * R::KTile::kWidth) =
          packing::e4m3x8<Source>(x[pass][i], inverse);
  }
}

// A block of V to its tile of V^T, in the order that P V wants.
template <class R, class Source>
__device__ __forceinline__ void convert_values(uint8_t* tile, uint4 (&x)[R::kTasks][4], float inverse) {
  const ColumnLane<R> at;
#pragma unroll
  for (int task = 0; task < R::kTasks; ++task) {
    packing::keep(x[task]);
    const uint32_t word[16] = {x[task][0].x, x[task][0].y, x[task][0].z, x[task][0].w, x[task][1].x, x[task][1].y,
                               x[task][1].z, x[task][1].w, x[task][2].x, x[task][2].y, x[task][2].z, x[task][2].w,
                               x[task][3].x, x[task][3].y, x[task][3].z, x[task][3].w};
    uint32_t packed[2][4];  // of both columns: positions 4t..4t+3, see packed_key
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto value = [&](int key) {
        return __fmul_rn(c == 0 ? Source::low(word[key]) : Source::high(word[key]), inverse);
      };
#pragma unroll
      for (int t = 0; t < 4; ++t)
        packed[c][t] = e4m3x4(value(2 * t), value(2 * t + 1), value(8 + 2 * t), value(9 + 2 * t));
    }
    const int column = at.column(task), row = R::value_row(packed_column(column));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t (&one)[4] = packed[c], (&other)[4] = packed[1 - c];
      *reinterpret_cast<uint4*>(tile + R::VTile::offset(row + (c ^ int(at.flip)), at.key(task))) =
          uint4{at.flip ? other[0] : one[0], at.flip ? other[1] : one[1], at.flip ? other[2] : one[2],
                at.flip ? other[3] : one[3]};
    }
  }
}

// 64 rows of Q, each with its own maximum, to their tile. slope[row] becomes `per_unit` times the row's descale.
template <class R, class Source>
__device__ __forceinline__ void convert_queries(uint8_t* tile, float* slope, uint4 (&x)[R::kQueryPasses][2],
                                                const QueryScaling& s, float per_unit) {
  constexpr int kPasses = R::kQueryPasses;
  static_assert(kPasses <= R::kLanes);
  uint32_t largest[kPasses];
  magnitudes<Source>(largest, x);
  const RowLane<R> at;
  // A lane finds the scale of one of its rows, and the others of that row ask it.
  float group = 0.f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const float of_row = Source::low(packing::row_max<R::kLanes>(largest[pass]));
    if (at.lane % kPasses == pass) group = of_row;
  }
  const packing::Scale scale = packing::scale_of(group, s.limit, s.limit_reciprocal);
  if (at.lane < kPasses) slope[at.first + at.lane * R::kRowStep] = scale.descale * per_unit;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const float inverse = __shfl_sync(~0u, scale.inverse, pass, R::kLanes);
    const int row = at.first + pass * R::kRowStep;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 bytes = packing::e4m3x8<Source>(x[pass][i], inverse);
      *reinterpret_cast<uint2*>(tile + R::QTile::offset(row, at.column(i))) = uint2{bytes.x ^ s.flip, bytes.y ^ s.flip};
    }
  }
}

}  // namespace fp8cutlass::sm90
