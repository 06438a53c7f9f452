// What include/fp8cutlass/integer.cuh does on a card.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace fp8cutlass {

template <int kBlocks>
void raise(uint32_t (&s)[kBlocks][4], const uint32_t (&four)[4]) {
  for (auto& block : s) std::memcpy(block, four, sizeof(four));
}
inline float most_or_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
inline float least_or_nan(float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); }
inline uint32_t u8x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto byte = [](uint32_t bits) {
    const float x = __uint_as_float(bits);
    return x != x ? 0u : uint32_t(std::nearbyint(std::fmin(std::fmax(x, 0.f), 255.f)));
  };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

}  // namespace fp8cutlass
