// K, V and Q on their way from 16 bits in global memory to the e4m3 tiles in shared memory that wgmma reads: part of
// resident.cuh, whose Resident<...> is R here. A warpgroup takes a block of 128 keys of K or of V, or 64 rows of Q. It
// holds them in registers between the maximum and the conversion. The bits are those of pack.cuh.
#pragma once

#include <cstdint>

#include "fp8cutlass/layout.h"
#include "fp8cutlass/pack.cuh"
#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/convert.cuh"

namespace fp8cutlass::sm90 {

// Rows of a tensor in 16 bits, from a first one on: `rows` are there and `columns` of each; the rest counts as zeros.
struct SourceRows {
  const uint8_t* first;
  int64_t stride;  // in bytes
  int rows, columns;
};

// What is read once, or zeros where it is not there; without a branch.
__device__ __forceinline__ uint4 load_if(const uint8_t* from, bool there) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred there;\n"
      "setp.ne.s32 there, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from), "r"(int(there)));
  return x;
}
__device__ __forceinline__ uint32_t load_word(const uint8_t* from, bool there) {
  uint32_t x;
  asm volatile(
      "{\n.reg .pred there;\n"
      "setp.ne.s32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.global.nc.L1::no_allocate.u32 %0, [%1];\n}"
      : "=r"(x)
      : "l"(from), "r"(int(there)));
  return x;
}

// The threads of one warpgroup.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  delay_point(18);
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// K and Q: a row belongs to kLanes neighbouring lanes, two chunks of 8 elements to each, whose bytes go to one line of
// the 128 bytes of banks; rows of other lines take their chunks in the other order, so that they do not meet in a bank.
template <class R>
struct RowLane {
  int lane, first, order;
  __device__ __forceinline__ RowLane() {
    const int thread = thread_index() % 128;
    lane = thread % R::kLanes, first = thread / R::kLanes;
    order = first / (128 / R::kHeadDim) % 2;
  }
  __device__ __forceinline__ int column(int i) const { return 8 * (lane + R::kLanes * (i ^ order)); }
};

template <class R>
struct RowLoader : RowLane<R> {
  const uint8_t* row;
  int64_t step;
  int left[2];
  __device__ __forceinline__ explicit RowLoader(const SourceRows& from) {
    row = from.first + this->first * from.stride;
    step = R::kRowStep * from.stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) left[i] = this->column(i) < from.columns ? from.rows - this->first : 0;
  }
  __device__ __forceinline__ const uint8_t* place(int pass, int i) const {
    return row + pass * step + 2 * this->column(i);
  }
  __device__ __forceinline__ bool there(int pass, int i) const { return pass * R::kRowStep < left[i]; }
  __device__ __forceinline__ void load(uint4 (&x)[2], int pass) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = load_if(place(pass, i), there(pass, i));
  }
};

template <class R, int kPasses>
__device__ __forceinline__ void load_rows(uint4 (&x)[kPasses][2], const SourceRows& from) {
  const RowLoader<R> loader(from);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) loader.load(x[pass], pass);
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
  __device__ __forceinline__ int column(int task) const { return 64 * ((warp + 4 * task) / R::kGroups) + 2 * pair; }
  __device__ __forceinline__ int key(int task) const { return 16 * ((warp + 4 * task) % R::kGroups); }
};

template <class R>
__device__ __forceinline__ void load_columns(uint4 (&x)[R::kTasks][4], const SourceRows& from) {
  const ColumnLane<R> at;
#pragma unroll
  for (int task = 0; task < R::kTasks; ++task) {
    const int left = at.column(task) < from.columns ? from.rows - at.key(task) : 0;
    const uint8_t* row = from.first + at.key(task) * from.stride + 2 * at.column(task);
    uint32_t word[16];
#pragma unroll
    for (int t = 0; t < 16; ++t, row += from.stride) word[t] = load_word(row, t < left);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[task][i] = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
  }
}

// The scale of a block that a warpgroup holds. `of_warp` is used once an item.
template <int kPasses, class Source>
__device__ __forceinline__ packing::Scale block_scale(uint32_t (&of_warp)[4], const uint32_t (&largest)[kPasses],
                                                      int warpgroup, float limit, float limit_reciprocal) {
  uint32_t bits = __reduce_max_sync(~0u, packing::largest_of(largest));
  const int thread = thread_index();
  if (thread % 32 == 0) of_warp[thread / 32 % 4] = bits;
  sync_warpgroup(warpgroup);
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) bits = max(bits, of_warp[warp]);
  return packing::scale_of(Source::low(bits), limit, limit_reciprocal);
}

// A block of K to its tile. Returns its descale.
template <class R, class Source>
__device__ __forceinline__ float convert_keys(uint8_t* tile, uint4 (&x)[R::kPasses][2], uint32_t (&of_warp)[4],
                                              int warpgroup, float limit, float limit_reciprocal) {
  uint32_t largest[R::kPasses];
  magnitudes<Source>(largest, x);
  const packing::Scale scale = block_scale<R::kPasses, Source>(of_warp, largest, warpgroup, limit, limit_reciprocal);
  const RowLane<R> at;
  uint8_t* const to[2] = {tile + R::KTile::offset(at.first, at.column(0)),
                          tile + R::KTile::offset(at.first, at.column(1))};  // a step of rows is a multiple of 8
#pragma unroll
  for (int pass = 0; pass < R::kPasses; ++pass) {
    packing::keep(x[pass]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint2*>(to[i] + pass * R::kRowStep * R::KTile::kWidth) =
          packing::e4m3x8<Source>(x[pass][i], scale.inverse);
  }
  return scale.descale;
}

// A block of V to its tile of V^T, in the order that P V wants. Returns its descale.
template <class R, class Source>
__device__ __forceinline__ float convert_values(uint8_t* tile, uint4 (&x)[R::kTasks][4], uint32_t (&of_warp)[4],
                                                int warpgroup, float limit, float limit_reciprocal) {
  uint32_t largest[R::kTasks];
  magnitudes<Source>(largest, x);
  const packing::Scale scale = block_scale<R::kTasks, Source>(of_warp, largest, warpgroup, limit, limit_reciprocal);
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
        return __fmul_rn(c == 0 ? Source::low(word[key]) : Source::high(word[key]), scale.inverse);
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
  return scale.descale;
}

// 64 rows of Q on their way through shared memory, where a thread finds what it has copied itself.
template <class R>
__device__ __forceinline__ void stage_rows(uint4* own, const SourceRows& from) {
  const RowLoader<R> loader(from);
#pragma unroll
  for (int pass = 0; pass < R::kQueryPasses; ++pass)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(own + 128 * (2 * pass + i))),
                   "l"(loader.place(pass, i)), "r"(loader.there(pass, i) ? 16 : 0)
                   : "memory");
}
template <class R>
__device__ __forceinline__ void take_rows(uint4 (&x)[R::kQueryPasses][2], const uint4* own) {
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int pass = 0; pass < R::kQueryPasses; ++pass)
#pragma unroll
    for (int i = 0; i < 2; ++i) x[pass][i] = own[128 * (2 * pass + i)];
}

// 64 rows of Q, each with its own maximum, to their tile. slope[row] becomes `per_unit` times the row's descale.
template <class R, class Source>
__device__ __forceinline__ void convert_queries(uint8_t* tile, float* slope, uint4 (&x)[R::kQueryPasses][2],
                                                const QueryScaling& s, float per_unit) {
  uint32_t largest[R::kQueryPasses];
  magnitudes<Source>(largest, x);
  const RowLane<R> at;
#pragma unroll
  for (int pass = 0; pass < R::kQueryPasses; ++pass) {
    const float group = Source::low(packing::row_max<R::kLanes>(largest[pass]));
    const packing::Scale scale = packing::scale_of(group, s.limit, s.limit_reciprocal);
    const int row = at.first + pass * R::kRowStep;
    if (at.lane == 0) slope[row] = scale.descale * per_unit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 bytes = packing::e4m3x8<Source>(x[pass][i], scale.inverse);
      *reinterpret_cast<uint2*>(tile + R::QTile::offset(row, at.column(i))) = uint2{bytes.x ^ s.flip, bytes.y ^ s.flip};
    }
  }
}

}  // namespace fp8cutlass::sm90
