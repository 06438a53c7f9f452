// A block of K or V that lies in shared memory in 16 bits, to FP8: part of deliver.cuh, whose Delivery<...> is D here.
#pragma once

#include <cstdint>

#include "fp8cutlass/pack.cuh"
#include "fp8cutlass/sm90/barrier.cuh"

namespace fp8cutlass::sm90 {

// A block that is loaded, converted or reported.
struct alignas(16) Unit {
  packing::Block block;  // operand -1: there is no more
  uint8_t* out;          // K: its first row
};

// packing::finite_magnitudes with a branch that a warp takes as one, as the compiler would issue both sides.
template <class Source, int kPasses, int kChunks>
__device__ __forceinline__ void magnitudes(uint32_t (&largest)[kPasses], uint4 (&x)[kPasses][kChunks]) {
  uint32_t all = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) all = __vmaxu2(all, largest[pass] = packing::magnitude(x[pass]));
  if (!__all_sync(~0u, packing::is_finite<Source>(all)))
    packing::finite_magnitudes<Source>(largest, x, packing::kMagnitude);
}

// The maximum over the threads that convert.
template <class D>
__device__ __forceinline__ uint32_t workers_max(uint32_t (&of_warp)[D::kWarps], uint32_t bits) {
  bits = __reduce_max_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
  sync_fetchers<D::kWorkers>();
#pragma unroll
  for (int warp = 0; warp < D::kWarps; ++warp) bits = max(bits, of_warp[warp]);
  return bits;
}

// Finds the scale of a block of K or V, and stores its descale.
template <class D, class Source, int kPasses>
__device__ __forceinline__ float block_scale(const PackOperand& o, const packing::Block& block,
                                             uint32_t (&of_warp)[D::kWarps], const uint32_t (&largest)[kPasses]) {
  const uint32_t bits = workers_max<D>(of_warp, packing::largest_of(largest));
  const packing::Scale scale = packing::scale_of(Source::low(bits), o.limit, o.limit_reciprocal);
  const int groups = (o.tokens + D::kRows - 1) / D::kRows;  // V is padded to 128 keys, which may be a block more
  if (threadIdx.x == 0 && block.index < groups) o.descale[int64_t{block.head} * groups + block.index] = scale.descale;
  return scale.inverse;
}

// K: rows stay rows.
template <class D, class Source>
__device__ __forceinline__ void deliver_rows(const PackOperand& o, const Unit& unit, const uint8_t* source,
                                             Barrier& empty, uint32_t (&of_warp)[D::kWarps]) {
  using Tile = typename D::SourceTile;
  const int lane = threadIdx.x % D::kLanes, first = threadIdx.x / D::kLanes;
  // Where four lanes have a row, the eight of an access have two: one takes its chunks in the other order, so that
  // they do not meet in a bank.
  const int order = D::kLanes == 4 ? first % 2 : 0;
  const auto column = [&](int i) { return 8 * (lane + D::kLanes * (i ^ order)); };
  uint4 x[D::kPasses][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* from = source + Tile::offset(first, 2 * column(i));  // a step of rows is a multiple of 8
#pragma unroll
    for (int pass = 0; pass < D::kPasses; ++pass)
      x[pass][i] = *reinterpret_cast<const uint4*>(from + pass * D::kRowStep * Tile::kWidth);
  }
  arrive(empty);
  uint32_t largest[D::kPasses];
  magnitudes<Source>(largest, x);
  const float inverse = block_scale<D, Source>(o, unit.block, of_warp, largest);
  const int left = o.tokens - unit.block.index * D::kRows - first;  // rows from the lane's first one on
  uint8_t* out = unit.out + first * o.out_stride_row;
#pragma unroll
  for (int pass = 0; pass < D::kPasses; ++pass, out += D::kRowStep * o.out_stride_row) {
    packing::keep(x[pass]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 bytes = packing::e4m3x8<Source>(x[pass][i], inverse);
      if (pass * D::kRowStep < left) *reinterpret_cast<uint2*>(out + column(i)) = bytes;
    }
  }
}

// V: rows become columns, in the order that P V wants. Lanes read words of one key, and take different groups of keys,
// which lie in the same banks, so that what they write does not meet either.
template <class D, class Source>
__device__ __forceinline__ void deliver_columns(const PackOperand& o, const packing::Block& block,
                                                const uint8_t* source, uint8_t* values, Barrier& empty,
                                                uint32_t (&of_warp)[D::kWarps]) {
  using Tile = typename D::SourceTile;
  constexpr int kKeys = 16;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;  // read afresh: kept addresses would spill
  const auto set = [&](int task) { return (warp + D::kWarps * task) / D::kGroups; };
  const auto group = [&](int task) { return (warp + D::kWarps * task) % D::kGroups ^ lane % D::kSpread; };
  uint4 x[D::kTasks][kKeys / 4];  // word t: key t of the group, two columns
#pragma unroll
  for (int task = 0; task < D::kTasks; ++task) {
    const uint8_t* from = source + set(task) * Tile::kBlockBytes + group(task) * kKeys * Tile::kWidth;
    uint32_t word[kKeys];
#pragma unroll
    for (int t = 0; t < 8; ++t) {  // the swizzle repeats every 8 rows
      const uint8_t* const at = from + Tile::offset(t, 4 * lane);
      word[t] = *reinterpret_cast<const uint32_t*>(at);
      word[t + 8] = *reinterpret_cast<const uint32_t*>(at + 8 * Tile::kWidth);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i)
      x[task][i] = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
  }
  arrive(empty);
  uint32_t largest[D::kTasks];
  magnitudes<Source>(largest, x);
  const float inverse = block_scale<D, Source>(o, block, of_warp, largest);
#pragma unroll
  for (int task = 0; task < D::kTasks; ++task) {
    packing::keep(x[task]);
    const uint32_t word[kKeys] = {x[task][0].x, x[task][0].y, x[task][0].z, x[task][0].w, x[task][1].x, x[task][1].y,
                                  x[task][1].z, x[task][1].w, x[task][2].x, x[task][2].y, x[task][2].z, x[task][2].w,
                                  x[task][3].x, x[task][3].y, x[task][3].z, x[task][3].w};
    const int row = packed_column(64 * set(task) + 2 * lane);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto value = [&](int key) {
        return __fmul_rn(c == 0 ? Source::low(word[key]) : Source::high(word[key]), inverse);
      };
      uint32_t packed[4];  // positions 4t..4t+3, see packed_key
#pragma unroll
      for (int t = 0; t < 4; ++t)
        packed[t] = e4m3x4(value(2 * t), value(2 * t + 1), value(8 + 2 * t), value(9 + 2 * t));
      *reinterpret_cast<uint4*>(values + D::ValueTile::offset(row + c, kKeys * group(task))) =
          uint4{packed[0], packed[1], packed[2], packed[3]};
    }
  }
  fence_async();
}

}  // namespace fp8cutlass::sm90
