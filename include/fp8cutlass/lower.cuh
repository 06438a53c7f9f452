// Rows of e4m3 Q that are divided by powers of two, so that their scores fit f16. python/fp8cutlass/quant/lower.py
// defines by how much.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::packing {

// The sum of |x| of 16 e4m3 bytes, side by side in a row: of each four two sums, all of these as a tree, in f16, and
// the two that are left in float32. It is a multiple of 2^-9, and those of kExactSums chunks sum up without rounding.
constexpr int kExactSums = 4;
__device__ __forceinline__ float sum_of_magnitudes(const uint4& x) {
  const auto two = [](uint32_t bytes) {
    uint32_t low, high;
    decode::to_halves(low, high, bytes & 0x7f7f7f7fu);
    return half2_add(low, high);
  };
  const uint32_t sums = half2_add(half2_add(two(x.x), two(x.y)), half2_add(two(x.z), two(x.w)));
  return half_low(sums) + half_high(sums);
}

constexpr int kMostOctaves = 10;  // 448 becomes 7/16

// By which power of two a row of kColumns elements has to be divided, whose |x| sum up to `sum`: the least with which
// |x| is at most 7/16 on average. But for rounding, no score with keys of 448 or less then exceeds 14 * 14 * kColumns.
// A row with a NaN is divided by the most that there is.
template <int kColumns>
__device__ __forceinline__ int octaves_above(float sum) {
  constexpr int kOctave = 1 << 23;  // of a float's bits
  const int above = int(__float_as_uint(sum)) - int(__float_as_uint(7.f / 16 * kColumns));
  return min(max(above + kOctave - 1, 0) / kOctave, kMostOctaves);
}

// What 16 e4m3 bytes are multiplied by to be divided by 2^octaves: an f16, twice, negative where signs are to `flip`.
__device__ __forceinline__ uint32_t divisor_of(int octaves, uint32_t flip) {
  return uint32_t(15 - octaves) * 0x04000400u | (flip & 0x80008000u);
}

// e4m3 bytes, rounded to nearest even. What does not become 0 is an f16 number before.
__device__ __forceinline__ void divide(uint4& x, uint32_t divisor) {
  const auto four = [&](uint32_t bytes) {
    uint32_t low, high;
    decode::to_halves(low, high, bytes);
    return e4m3x4(half2_multiply(low, divisor), half2_multiply(high, divisor));
  };
  x = uint4{four(x.x), four(x.y), four(x.z), four(x.w)};
}

__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float(uint32_t(127 + n) << 23); }

}  // namespace fp8cutlass::packing
