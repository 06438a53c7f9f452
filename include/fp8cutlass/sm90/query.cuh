// Q as a caller has it, quantised from bf16 or fp16, or lowered where it is e4m3, on its way to the tile that wgmma
// reads. The warps beside the one that drives the copy engine have nothing else to do, and Q is then read once and
// never written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8cutlass/lower.cuh"
#include "fp8cutlass/params.h"
#include "fp8cutlass/quantise.cuh"
#include "fp8cutlass/sm90/kernel_params.h"

namespace fp8cutlass::sm90 {

constexpr int kRowThreads = 96;  // three warps
constexpr int kRowsAtOnce = 16;  // of a warp: lanes l and l + 16 own the halves of a row, so that no two of the 8
                                 // lanes of an access meet in a bank

// One row of a tile, its own maximum as the scale. Returns its descale. All lanes of a warp come here together.
template <class Source, class SourceTile, class QTile>
__device__ __forceinline__ float quantise_row(uint8_t* q, const uint8_t* source, int row, const QueryScaling& s) {
  constexpr int kChunks = QTile::kRowBytes / 16;  // of half a row
  static_assert(SourceTile::kRowBytes == 2 * QTile::kRowBytes && kChunks % 2 == 0);
  const int first = threadIdx.x % 32 / kRowsAtOnce * kChunks;
  const int from = SourceTile::offset(row, 16 * first), to = QTile::offset(row, 8 * first);
  const auto chunk = [&](int i) {
    return *reinterpret_cast<const uint4*>(source + SourceTile::template behind<kChunks>(from, row, 16 * first, i));
  };
  uint32_t largest = 0;
#pragma unroll kChunks / 2
  for (int i = 0; i < kChunks; ++i) largest = packing::magnitude(chunk(i), largest);
  largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, kRowsAtOnce));
  const bool finite = packing::is_finite<Source>(largest);
  if (!__all_sync(~0u, finite)) {  // rare: infinities and NaN are left out of the maximum
    largest = 0;
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i)
      largest = packing::magnitude(packing::without_non_finite<Source>(chunk(i), 0), largest);
    largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, kRowsAtOnce));
  }
  const float group = Source::low(packing::larger_half(largest));
  const packing::Scale scale = packing::scale_of(group, s.limit, s.limit_reciprocal);
#pragma unroll 1
  for (int i = 0; i < kChunks; i += 2) {
    uint4 low = chunk(i), high = chunk(i + 1);
    if (!finite) {
      low = packing::without_non_finite<Source>(low, packing::kMagnitude);  // a NaN
      high = packing::without_non_finite<Source>(high, packing::kMagnitude);
    }
    const uint2 a = packing::e4m3x8<Source>(low, scale.inverse), b = packing::e4m3x8<Source>(high, scale.inverse);
    *reinterpret_cast<uint4*>(q + QTile::template behind<kChunks / 2>(to, row, 8 * first, i / 2)) =
        uint4{a.x ^ s.flip, a.y ^ s.flip, b.x ^ s.flip, b.y ^ s.flip};
  }
  return scale.descale;
}

// One row of a tile, which lies at `source` as it does in the result. Returns the power of two that it was divided by.
// All lanes of a warp come here together.
template <class QTile>
__device__ __forceinline__ float lower_row(uint8_t* q, const uint8_t* source, int row, uint32_t flip) {
  constexpr int kChunks = QTile::kRowBytes / 32;  // of half a row
  static_assert(kChunks <= packing::kExactSums);
  static_assert(QTile::kRowBytes <= 128);  // a sum beyond float32's integers then means the most octaves anyway
  const int first = threadIdx.x % 32 / kRowsAtOnce * 16 * kChunks, from = QTile::offset(row, first);
  const auto place = [&](int i) { return QTile::template behind<kChunks>(from, row, first, i); };
  const auto chunk = [&](int i) { return *reinterpret_cast<const uint4*>(source + place(i)); };
  float sum = 0.f;
#pragma unroll 2
  for (int i = 0; i < kChunks; ++i) sum += packing::sum_of_magnitudes(chunk(i));
  sum += __shfl_xor_sync(~0u, sum, kRowsAtOnce);
  const int octaves = packing::octaves_above<QTile::kRowBytes>(sum);
  const uint32_t divisor = packing::divisor_of(octaves, flip);
#pragma unroll 2
  for (int i = 0; i < kChunks; ++i) {  // read again, as there are few registers
    uint4 x = chunk(i);
    packing::divide(x, divisor);
    *reinterpret_cast<uint4*>(q + place(i)) = x;
  }
  return packing::power_of_two(octaves);
}

// The first `rows` rows, `thread` of kRowThreads. slope[row] becomes what the row was divided by, times that of its
// half of the tile.
template <class QTile>
__device__ __forceinline__ void lower_tile(uint8_t* q, const uint8_t* source, float* slope, const float (&of_half)[2],
                                           int rows, uint32_t flip, int thread) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int base = thread / 32 * kRowsAtOnce; base < rows; base += kRowThreads / 32 * kRowsAtOnce) {
    const int row = base + lane % kRowsAtOnce;
    const float power = lower_row<QTile>(q, source, row, flip);
    if (lane < kRowsAtOnce) slope[row] = (base < QTile::kRows / 2 ? of_half[0] : of_half[1]) * power;
  }
}

// The rows of a tile, `thread` of kRowThreads. slope[row] becomes `per_unit` times the row's descale.
template <class Source, class SourceTile, class QTile>
__device__ __forceinline__ void quantise_tile(uint8_t* q, float* slope, const uint8_t* source, const QueryScaling& s,
                                              float per_unit, int thread) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int base = thread / 32 * kRowsAtOnce; base < QTile::kRows; base += kRowThreads / 32 * kRowsAtOnce) {
    const int row = base + lane % kRowsAtOnce;
    const float descale = quantise_row<Source, SourceTile, QTile>(q, source, row, s);
    if (lane < kRowsAtOnce) slope[row] = descale * per_unit;
  }
}

}  // namespace fp8cutlass::sm90
