// What include/fp8cutlass/sm89/instructions.cuh does on a card, by the fragment layouts of the PTX manual. A product's
// sum is rounded once; tensor cores cut more.
#pragma once

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::sm89 {

inline void copy16(void* to, const void* from, bool is_there) {
  device::copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), is_there ? 16 : 0, 16);
}
inline void copy16(void* to, const void* from) { copy16(to, from, true); }
inline void commit_copies() { device::commit(); }
template <int kPending>
void wait_copies() {
  if (kPending == 0) commit_copies();  // it waits for all copies
  device::wait_for(kPending);
}
inline void hide_stride(int64_t&) {}

inline void load_matrices(uint32_t (&r)[4], const uint8_t* row) { device::load_matrices(r, row); }

struct E4m3 {
  static double value(uint8_t byte) { return e4m3_value(byte); }
};
struct E5m2 {
  static double value(uint8_t byte) { return half_value(uint16_t(byte << 8)); }
};
struct S8 {
  static double value(uint8_t byte) { return int8_t(byte); }
};
struct U8 {
  static double value(uint8_t byte) { return byte; }
};

// Of a lane's four elements of d, what the product adds.
template <class A, class B>
std::array<double, 4> products(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto all = device::gathered(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = device::lane();
  std::array<double, 4> sums{};
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int t = k % 16 / 4, bits = 8 * (k % 4);
      const uint32_t x = all[row % 8 * 4 + t].a[row / 8 + k / 16 * 2], y = all[column * 4 + t].b[k / 16];
      sums[i] += A::value(uint8_t(x >> bits)) * B::value(uint8_t(y >> bits));
    }
  }
  return sums;
}

template <class A, class B>
struct Float32 {
  static void fma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto sums = products<A, B>(a, b0, b1);
    for (int i = 0; i < 4; ++i) d[i] = float(d[i] + sums[i]);
  }
};
template <class A, class B>
struct Half {
  static void fma(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto sums = products<A, B>(a, b0, b1);
    for (int r = 0; r < 2; ++r)
      d[r] = fp16x2(float(half_low(d[r]) + sums[2 * r]), float(half_high(d[r]) + sums[2 * r + 1]));
  }
};
template <class A>
struct Integer {
  static void fma(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto sums = products<A, S8>(a, b0, b1);
    for (int i = 0; i < 4; ++i) d[i] += uint32_t(int32_t(sums[i]));
  }
};

using SM89_16x8x32_F32E4M3E4M3F32_TN = Float32<E4m3, E4m3>;
using SM89_16x8x32_F32E4M3E5M2F32_TN = Float32<E4m3, E5m2>;
using SM89_16x8x32_F32E5M2E5M2F32_TN = Float32<E5m2, E5m2>;
using SM89_16x8x32_F16E4M3E4M3F16_TN = Half<E4m3, E4m3>;
using SM80_16x8x32_S32S8S8S32_TN = Integer<S8>;
using SM80_16x8x32_S32U8S8S32_TN = Integer<U8>;

}  // namespace fp8cutlass::sm89
