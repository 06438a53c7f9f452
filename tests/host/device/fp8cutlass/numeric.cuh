// The numbers of single instructions, on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fp8cutlass {

inline float half_value(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return float(x);
}
inline uint16_t half_bits(float value) {
  const _Float16 x = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &x, 2);
  return bits;
}
inline uint16_t bf16_bits(float value) {
  const uint32_t x = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
inline float half_low(uint32_t x) { return half_value(uint16_t(x)); }
inline float half_high(uint32_t x) { return half_value(uint16_t(x >> 16)); }
inline uint32_t fp16x2(float low, float high) { return uint32_t(half_bits(high)) << 16 | half_bits(low); }
inline uint32_t bf16x2(float low, float high) { return uint32_t(bf16_bits(high)) << 16 | bf16_bits(low); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }

template <class Score>
constexpr Score kHiddenScore = -INFINITY;
template <>
constexpr uint32_t kHiddenScore<uint32_t> = 0xFF800000u;

constexpr uint32_t kHalf2NegInf = 0xFC00FC00u;
inline uint32_t hide(uint32_t s, uint32_t where) { return (s & ~where) | (kHalf2NegInf & where); }
inline uint32_t signs_of_bytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = which >> 4 * i & 15, byte = bytes >> 8 * (digit & 7) & 255;
    x |= (digit & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return x;
}

// A float as an e4m3 byte: round to nearest even, saturating, NaN positive.
inline uint8_t e4m3_byte(float x) {
  if (x != x) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  if (size >= 448.f) return sign | 0x7e;
  const int exponent = std::max(size > 0.f ? std::ilogb(size) : -6, -6);
  const int eighths = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 0 to 16; below 8 subnormal
  return uint8_t(sign | (exponent + 6) * 8 + eighths);
}
inline uint32_t e4m3x4(float a, float b, float c, float d) {
  return uint32_t(e4m3_byte(d)) << 24 | uint32_t(e4m3_byte(c)) << 16 | uint32_t(e4m3_byte(b)) << 8 | e4m3_byte(a);
}

// An e4m3 byte.
inline float e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const float sign = byte & 0x80 ? -1.f : 1.f;
  if (exponent == 15 && fraction == 7) return NAN;
  return sign * (exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10));
}

}  // namespace fp8cutlass
