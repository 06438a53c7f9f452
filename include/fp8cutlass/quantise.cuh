// What it takes to quantise rows of 16-bit numbers to e4m3, in the kernels that pack operands and in those that
// quantise Q by themselves. The same as python/fp8cutlass/quantize.py, bit for bit: every product is rounded to float32
// on its own, and denormals count.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::packing {

constexpr uint32_t kMagnitude = 0x7fff7fff;  // all but the signs of two 16-bit numbers

// The two source types. |x| of both orders like its bits, and infinities and NaN stand above everything finite.
struct Bf16 {
  static constexpr uint32_t kInfinity = 0x7f80;
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
};

struct Fp16 {
  static constexpr uint32_t kInfinity = 0x7c00;
  static __device__ __forceinline__ float low(uint32_t pair) { return half_low(pair); }
  static __device__ __forceinline__ float high(uint32_t pair) { return half_high(pair); }
};

// ---- maxima, on the bits of two numbers at once ---------------------------------------------------------------------

// A chunk is 8 numbers, 16 bytes.
__device__ __forceinline__ uint32_t magnitude(const uint4& x, uint32_t largest) {
  largest = __vmaxu2(largest, x.x & kMagnitude);
  largest = __vmaxu2(largest, x.y & kMagnitude);
  largest = __vmaxu2(largest, x.z & kMagnitude);
  return __vmaxu2(largest, x.w & kMagnitude);
}

template <int kChunks>
__device__ __forceinline__ uint32_t magnitude(const uint4 (&x)[kChunks]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) largest = magnitude(x[i], largest);
  return largest;
}

__device__ __forceinline__ uint32_t larger_half(uint32_t pair) { return max(pair & 0xffff, pair >> 16); }

template <class Source>
__device__ __forceinline__ bool is_finite(uint32_t magnitudes) {
  return larger_half(magnitudes) < Source::kInfinity;
}

// Puts `by` in the place of every infinity and NaN.
template <class Source>
__device__ __forceinline__ void replace_non_finite(uint32_t& pair, uint32_t by) {
  const uint32_t wrong = __vcmpgeu2(pair & kMagnitude, Source::kInfinity * 0x10001u);
  pair = (pair & ~wrong) | (by & wrong);
}

template <class Source>
__device__ __forceinline__ uint4 without_non_finite(uint4 x, uint32_t by) {
  replace_non_finite<Source>(x.x, by);
  replace_non_finite<Source>(x.y, by);
  replace_non_finite<Source>(x.z, by);
  replace_non_finite<Source>(x.w, by);
  return x;
}

// ---- scales ---------------------------------------------------------------------------------------------------------

struct Scale {
  float descale, inverse;
};

// For a group whose largest finite magnitude is `group`, as fp8cutlass.quantize has it. Zeros get descale 1 and inverse
// 1. torch divides a number by a tensor in two roundings, a reciprocal and a product, and so does this.
__device__ __forceinline__ Scale scale_of(float group, float limit, float limit_reciprocal) {
  group = group > 0.f ? fmaxf(group, limit * 0x1p-126f) : limit;
  return {__fmul_rn(group, limit_reciprocal), __fmul_rn(__frcp_rn(group), limit)};
}

// The same for integers, which have no NaN: a group of which something is not finite has the descale NaN, and zeros.
__device__ __forceinline__ Scale integer_scale_of(float group, float limit, float limit_reciprocal) {
  const Scale scale = scale_of(group, limit, limit_reciprocal);
  return group <= FLT_MAX ? scale : Scale{__int_as_float(0x7fffffff), 0.f};
}

// ---- conversion -----------------------------------------------------------------------------------------------------

// A chunk, each element times its factor. Values need no clamp: |x| / group <= 1, so that a product lies beyond the
// limit by its rounding at most, and the limit is what it then rounds to in e4m3.
template <class Source>
__device__ __forceinline__ uint2 e4m3x8(const uint4& x, const float (&factor)[8]) {
  return {e4m3x4(__fmul_rn(Source::low(x.x), factor[0]), __fmul_rn(Source::high(x.x), factor[1]),
                 __fmul_rn(Source::low(x.y), factor[2]), __fmul_rn(Source::high(x.y), factor[3])),
          e4m3x4(__fmul_rn(Source::low(x.z), factor[4]), __fmul_rn(Source::high(x.z), factor[5]),
                 __fmul_rn(Source::low(x.w), factor[6]), __fmul_rn(Source::high(x.w), factor[7]))};
}

template <class Source>
__device__ __forceinline__ uint2 e4m3x8(const uint4& x, float factor) {
  const float factors[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
  return e4m3x8<Source>(x, factors);
}

// Four floats rounded to even s8; a in the lowest byte. NaN is 0.
__device__ __forceinline__ uint32_t s8x4(float a, float b, float c, float d) {
  uint32_t r;
  asm("{\n.reg .s32 a, b, c, d;\n"
      "cvt.rni.s32.f32 a, %1;\n"
      "cvt.rni.s32.f32 b, %2;\n"
      "cvt.rni.s32.f32 c, %3;\n"
      "cvt.rni.s32.f32 d, %4;\n"
      "cvt.pack.sat.s8.s32.b32 %0, d, c, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, b, a, %0;\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

template <class Source>
__device__ __forceinline__ uint2 s8x8(const uint4& x, float factor) {
  return {s8x4(__fmul_rn(Source::low(x.x), factor), __fmul_rn(Source::high(x.x), factor),
               __fmul_rn(Source::low(x.y), factor), __fmul_rn(Source::high(x.y), factor)),
          s8x4(__fmul_rn(Source::low(x.z), factor), __fmul_rn(Source::high(x.z), factor),
               __fmul_rn(Source::low(x.w), factor), __fmul_rn(Source::high(x.w), factor))};
}

}  // namespace fp8cutlass::packing
