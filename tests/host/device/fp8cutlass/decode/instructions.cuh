// What include/fp8cutlass/decode/instructions.cuh does on a card, by the fragment layouts of the PTX manual.
#pragma once

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::decode {

inline void copy16(uint8_t* to, const uint8_t* from, int bytes) { device::copy(to, from, bytes, 16); }
inline void copy8(void* to, const void* from, int bytes) {
  device::copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes, 8);
}
inline void copy4(void* to, const void* from, int bytes) {
  device::copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes, 4);
}
inline uint4 load16(const uint8_t* from) {
  uint4 x;
  device::perform({reinterpret_cast<uint8_t*>(&x), from, 16, 16});
  return x;
}
inline void commit() { device::commit(); }
template <int kPending>
void wait() {
  device::wait_for(kPending);
}

template <int kThreads>
class Meeting {
 public:
  void begin() { device::cta->first.size = kThreads; }
  void all() { device::meet(device::cta->first); }

 private:
  uint64_t barrier_;
};

inline void load_matrices(uint32_t (&r)[4], const uint8_t* row) { device::load_matrices(r, row); }
inline void load_transposed(uint32_t (&r)[4], const uint8_t* row) {
  const auto rows = device::gathered(row);
  const int g = device::lane() / 4, t = device::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    uint16_t low, high;
    std::memcpy(&low, rows[8 * i + 2 * t] + 2 * g, 2);
    std::memcpy(&high, rows[8 * i + 2 * t + 1] + 2 * g, 2);
    r[i] = uint32_t(high) << 16 | low;
  }
}
inline uint32_t transposed(uint32_t x) {
  const auto all = device::gathered(x);
  const int g = device::lane() / 4, t = device::lane() % 4;
  const auto at = [&](int row, int column) { return all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff; };
  return at(2 * t + 1, g) << 16 | at(2 * t, g);
}

inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto all = device::gathered(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = device::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2;
      const uint32_t x = all[row % 8 * 4 + t].a[row / 8 + k / 8 * 2], y = all[column * 4 + t].b[k / 8];
      sum += double(half_value(uint16_t(x >> 16 * (k % 2)))) * half_value(uint16_t(y >> 16 * (k % 2)));
    }
    d[i] = float(sum);
  }
}

inline void to_halves(uint32_t& low, uint32_t& high, uint32_t bytes) {
  const auto pair = [](uint32_t x) { return fp16x2(e4m3_value(uint8_t(x)), e4m3_value(uint8_t(x >> 8))); };
  const uint32_t both = bytes;
  low = pair(both), high = pair(both >> 16);
}

inline unsigned arrive(unsigned* counter) { return (*counter)++; }

inline float4 load_result(const float* p, bool there) {
  return there ? *reinterpret_cast<const float4*>(p) : make_float4(0.f, 0.f, 0.f, 0.f);
}
inline float2 load_score(const float* p, bool there) {
  return there ? *reinterpret_cast<const float2*>(p) : make_float2(-INFINITY, 0.f);
}

}  // namespace fp8cutlass::decode
