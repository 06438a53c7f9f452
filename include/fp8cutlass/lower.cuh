// e4m3 that is divided by powers of two, so that scores of it fit f16. Its sum is python/fp8cutlass/quant/lower.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::packing {

// Four e4m3 bytes, rounded to nearest even. NaN stays NaN.
__device__ __forceinline__ uint32_t times(uint32_t bytes, float factor) {
  uint32_t low, high;
  decode::to_halves(low, high, bytes);
  return e4m3x4(__fmul_rn(half_low(low), factor), __fmul_rn(half_high(low), factor), __fmul_rn(half_low(high), factor),
                __fmul_rn(half_high(high), factor));
}

__device__ __forceinline__ void multiply(uint4& x, float factor) {
  x = uint4{times(x.x, factor), times(x.y, factor), times(x.z, factor), times(x.w, factor)};
}

// Over 2^octaves, at most 16, rounded to nearest even. Quotients that do not become 0 are f16 numbers, which take half
// of the instructions of float32.
__device__ __forceinline__ uint32_t divided(uint32_t bytes, uint32_t factor) {
  uint32_t low, high;
  decode::to_halves(low, high, bytes);
  return e4m3x4(half2_multiply(low, factor), half2_multiply(high, factor));
}

__device__ __forceinline__ void divide(uint4& x, int octaves) {
  const uint32_t half = octaves < 15 ? uint32_t(15 - octaves) << 10 : 1u << (24 - octaves), factor = half * 0x10001u;
  x = uint4{divided(x.x, factor), divided(x.y, factor), divided(x.z, factor), divided(x.w, factor)};
}

// The largest |x| of 16 e4m3 bytes and of `largest`, two bytes side by side in halves of a word.
__device__ __forceinline__ uint32_t larger_bytes(const uint4& x, uint32_t largest) {
  constexpr uint32_t kEven = 0x007f007f;  // without signs
  const auto larger = [](uint32_t a, uint32_t word) { return __vmaxu2(__vmaxu2(a, word & kEven), word >> 8 & kEven); };
  return larger(larger(larger(larger(largest, x.x), x.y), x.z), x.w);
}

// By which power of two what has this largest |x|, of both halves, has to be divided. A NaN counts as 448.
__device__ __forceinline__ int octaves_above(uint32_t largest, int limit) {
  constexpr uint32_t kLargest = 0x7e;
  const int byte = int(min(max(largest & 0xffff, largest >> 16), kLargest));
  return max(byte - limit + 7, 0) / 8;  // an octave is eight bytes
}

__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float(uint32_t(127 + n) << 23); }

}  // namespace fp8cutlass::packing
