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
inline float tanh_fast(float x) { return std::tanh(x); }

inline void dependents_may_begin() {}
inline void wait_for_operands() {}

inline int thread_index() { return int(device::self->thread.x); }
inline int unpredicated(bool condition) { return condition; }
inline uint32_t hidden(uint32_t x) { return x; }
inline float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(~0u, x, 1));
  return std::fmax(x, __shfl_xor_sync(~0u, x, 2));
}
inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Of two halves each, rounded once.
template <class Do>
uint32_t half2_do(uint32_t a, uint32_t b, uint32_t c, const Do& one) {
  const auto half = [](double x) {
    const _Float16 rounded = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &rounded, 2);
    return uint32_t(bits);
  };
  return half(one(half_low(a), half_low(b), half_low(c))) | half(one(half_high(a), half_high(b), half_high(c))) << 16;
}
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  return half2_do(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
inline uint32_t half2_fma_relu(uint32_t a, uint32_t b, uint32_t c) {
  return half2_do(a, b, c, [](double x, double y, double z) { return x * y + z < 0 ? 0. : x * y + z; });
}
inline uint32_t half2_add(uint32_t a, uint32_t b) {
  return half2_do(a, b, 0, [](double x, double y, double) { return x + y; });
}
inline uint32_t half2_multiply(uint32_t a, uint32_t b) {
  return half2_do(a, b, 0, [](double x, double y, double) { return x * y; });
}
inline uint32_t half2_max(uint32_t a, uint32_t b) {
  return half2_do(a, b, 0, [](double x, double y, double) { return std::fmax(x, y); });
}
inline uint32_t half2_less(uint32_t a, uint32_t b) {
  return (half_low(a) < half_low(b) ? 0xffffu : 0u) | (half_high(a) < half_high(b) ? 0xffff0000u : 0u);
}
constexpr uint32_t half2_of(int value) {
  int exponent = 0;
  while (value >> (exponent + 1) != 0) ++exponent;
  const uint32_t bits = value == 0 ? 0u : uint32_t(exponent + 15) << 10 | (uint32_t(value) << 10 >> exponent & 0x3ffu);
  return bits * 0x10001u;
}

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

inline uint32_t e4m3x4(uint32_t ab, uint32_t cd) {
  return e4m3x4(half_low(ab), half_high(ab), half_low(cd), half_high(cd));
}

// An e4m3 byte.
inline float e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const float sign = byte & 0x80 ? -1.f : 1.f;
  if (exponent == 15 && fraction == 7) return NAN;
  return sign * (exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10));
}

// Two e4m3 numbers for each: the nearest one, and the nearest to what that left, by way of f16.
inline void e4m3x4_terms(uint32_t& low, uint32_t& high, float a, float b, float c, float d) {
  const float x[] = {half_value(half_bits(a)), half_value(half_bits(b)), half_value(half_bits(c)),
                     half_value(half_bits(d))};
  low = high = 0;
  for (int i = 0; i < 4; ++i) {
    const uint8_t nearest = e4m3_byte(x[i]);
    high |= uint32_t(nearest) << 8 * i;
    low |= uint32_t(e4m3_byte(half_value(half_bits(x[i] - e4m3_value(nearest))))) << 8 * i;
  }
}

}  // namespace fp8cutlass
