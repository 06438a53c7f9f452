// What becomes of a row, which lanes of 16 columns share: python/fp8cutlass/quant/rope.py, prepare.py, rotate.py and
// quantize.py, bit for bit. Every operation is rounded on its own, and denormals count.
#pragma once

#include <cfloat>

#include "fp8cutlass/append/params.h"
#include "fp8cutlass/quantise.cuh"

namespace fp8cutlass::appending {

// Bit d % 32 of word d / 32 set: column d changes its sign.
__constant__ const uint32_t kSigns[8] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                         0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};

constexpr float kLimit = 448.f, kLimitReciprocal = 1.0 / 448.0;

__device__ __forceinline__ int bytes_of(int type) { return type == kFp32 ? 4 : type == kE4m3 ? 1 : 2; }

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= FLT_MAX; }

// A lane's columns as they lie.
__device__ __forceinline__ void load(uint4 (&raw)[4], const uint8_t* from, int type) {
  const uint4* const chunks = reinterpret_cast<const uint4*>(from);
  raw[0] = chunks[0];
  if (type != kE4m3) raw[1] = chunks[1];
  if (type == kFp32) raw[2] = chunks[2], raw[3] = chunks[3];
}

template <class Source>
__device__ __forceinline__ void unpack(float* y, const uint4& x) {
  y[0] = Source::low(x.x), y[1] = Source::high(x.x), y[2] = Source::low(x.y), y[3] = Source::high(x.y);
  y[4] = Source::low(x.z), y[5] = Source::high(x.z), y[6] = Source::low(x.w), y[7] = Source::high(x.w);
}

__device__ __forceinline__ void unpack(float* y, const uint4& x) {
  y[0] = __uint_as_float(x.x), y[1] = __uint_as_float(x.y);
  y[2] = __uint_as_float(x.z), y[3] = __uint_as_float(x.w);
}

__device__ __forceinline__ void to_floats(float (&y)[16], const uint4 (&raw)[4], int type) {
  if (type == kBf16) {
    unpack<packing::Bf16>(y, raw[0]), unpack<packing::Bf16>(y + 8, raw[1]);
  } else if (type == kFp16) {
    unpack<packing::Fp16>(y, raw[0]), unpack<packing::Fp16>(y + 8, raw[1]);
  } else {
    unpack(y, raw[0]), unpack(y + 4, raw[1]), unpack(y + 8, raw[2]), unpack(y + 12, raw[3]);
  }
}

// Eight numbers, aligned to 16 bytes.
__device__ __forceinline__ void load8(float (&y)[8], const uint8_t* from, int type) {
  const uint4* const chunks = reinterpret_cast<const uint4*>(from);
  if (type == kBf16) {
    unpack<packing::Bf16>(y, chunks[0]);
  } else if (type == kFp16) {
    unpack<packing::Fp16>(y, chunks[0]);
  } else {
    unpack(y, chunks[0]), unpack(y + 4, chunks[1]);
  }
}

__device__ __forceinline__ void round_to(float (&y)[16], int type) {
  if (type == kFp32) return;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const uint32_t pair = type == kBf16 ? bf16x2(y[j], y[j + 1]) : fp16x2(y[j], y[j + 1]);
    y[j] = type == kBf16 ? packing::Bf16::low(pair) : packing::Fp16::low(pair);
    y[j + 1] = type == kBf16 ? packing::Bf16::high(pair) : packing::Fp16::high(pair);
  }
}

// A pair (a, b) turned.
__device__ __forceinline__ float turned_first(float a, float b, float c, float s) {
  return __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
}
__device__ __forceinline__ float turned_second(float a, float b, float c, float s) {
  return __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
}

// Columns `column` to `column` + 15 of the row at `row`, which are y, turned by the angles of a position.
__device__ __forceinline__ void turn(float (&y)[16], const AppendParams& p, const uint8_t* row, int column,
                                     int position) {
  const int at = between(position, 0, p.table_rows - 1), bytes = bytes_of(p.angle_type);
  const uint8_t *const cosines = p.cos.base + at * p.cos.row, *const sines = p.sin.base + at * p.sin.row;
  if (p.interleaved) {
    float c[8], s[8];
    load8(c, cosines + column / 2 * bytes, p.angle_type), load8(s, sines + column / 2 * bytes, p.angle_type);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = y[2 * j], b = y[2 * j + 1];
      y[2 * j] = turned_first(a, b, c[j], s[j]), y[2 * j + 1] = turned_second(a, b, c[j], s[j]);
    }
  } else {
#pragma unroll
    for (int part = 0; part < 16; part += 8) {
      const bool second = column + part >= p.half;
      const int angle = column + part - (second ? p.half : 0);
      float c[8], s[8], other[8];
      load8(c, cosines + angle * bytes, p.angle_type), load8(s, sines + angle * bytes, p.angle_type);
      load8(other, row + (angle + (second ? 0 : p.half)) * bytes_of(p.type), p.type);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float own = y[part + j];
        y[part + j] = second ? turned_second(other[j], own, c[j], s[j]) : turned_first(own, other[j], c[j], s[j]);
      }
    }
  }
  round_to(y, p.type);
}

__device__ __forceinline__ void subtract(float (&y)[16], const float* mean) {
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    const float4 m = *reinterpret_cast<const float4*>(mean + j);
    y[j] = __fsub_rn(y[j], m.x), y[j + 1] = __fsub_rn(y[j + 1], m.y);
    y[j + 2] = __fsub_rn(y[j + 2], m.z), y[j + 3] = __fsub_rn(y[j + 3], m.w);
  }
}

// All threads of a warp come here. Lanes that share a transform have columns of one row.
__device__ __forceinline__ void rotate(float (&y)[16], int column, int columns, float scale) {
  const uint32_t signs = kSigns[column / 32] >> column % 32;
#pragma unroll
  for (int j = 0; j < 16; ++j) y[j] = __uint_as_float(__float_as_uint(y[j]) ^ (signs >> j & 1) << 31);
#pragma unroll
  for (int apart = 1; apart < 16; apart *= 2) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j & apart) continue;
      const float u = y[j], v = y[j + apart];
      y[j] = __fadd_rn(u, v), y[j + apart] = __fsub_rn(u, v);
    }
  }
#pragma unroll 1
  for (int step = 1; kColumns * step < columns; step *= 2) {
    const bool second = threadIdx.x & step;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float other = __shfl_xor_sync(~0u, y[j], step);
      y[j] = second ? __fsub_rn(other, y[j]) : __fadd_rn(y[j], other);
    }
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) y[j] = __fmul_rn(__fadd_rn(y[j], 0.f), scale);
}

// The largest finite magnitude of a lane's columns.
__device__ __forceinline__ float largest(const float (&y)[16]) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) most = fmaxf(most, finite(y[j]) ? fabsf(y[j]) : 0.f);
  return most;
}

// The inverse of a descale that is given: it is clamped to what has a normal one. NaN stays NaN.
__device__ __forceinline__ float inverse_of(float descale) {
  return __frcp_rn(descale == descale ? fminf(fmaxf(descale, 0x1p-126f), 0x1p126f) : descale);
}

// A lane's columns in e4m3. Finite values saturate, others become NaN.
__device__ __forceinline__ uint4 quantised(const float (&y)[16], float inverse) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float z[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = y[4 * i + j];
      z[j] = finite(x) ? __fmul_rn(x, inverse) : __uint_as_float(0x7fffffff);
    }
    words[i] = e4m3x4(z[0], z[1], z[2], z[3]);
  }
  return uint4{words[0], words[1], words[2], words[3]};
}

}  // namespace fp8cutlass::appending
