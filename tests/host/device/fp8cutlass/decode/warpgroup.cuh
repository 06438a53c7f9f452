// What include/fp8cutlass/decode/warpgroup.cuh does on a card. Products run when their sums are awaited, as late as the
// program allows, and read shared memory then; or at once. A warp computes its own 16 rows.
#pragma once

#include "fp8cutlass/decode/rows.h"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::decode {

using Barrier = uint64_t;

inline device::Arrivals& arrivals(Barrier& barrier) { return reinterpret_cast<device::Arrivals&>(barrier); }
inline void init(Barrier& barrier, int count) { arrivals(barrier) = {int16_t(count), int16_t(count), 0}; }
inline void arrive(Barrier& barrier) {
  device::Arrivals& a = arrivals(barrier);
  if (--a.lacking == 0) a.lacking = a.wanted, ++a.phases;
}
inline void wait(Barrier& barrier, int parity) {
  for (int looks = 0; int(arrivals(barrier).phases % 2) == parity; ++looks) {
    if (looks == 1 << 14) device::stop("a thread waits for ever");
    device::pause();
  }
}

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

inline void fence_products() {}
inline void meet_warpgroup() { device::meet(device::own_warpgroup()); }

inline void begin_products() {}
template <int kBlocks>
void begin_products(float (&)[kBlocks][4]) {}
inline void end_products() {}
template <int kBlocks>
void await_products(float (&)[kBlocks][4]) {
  for (const auto& product : device::self->products) product();
  device::self->products.clear();
}

// Element (row, k) of 16 x 16, from what each lane has of it: lane (g, t) rows g and g + 8, columns 2t, 2t + 1 and 8
// more.
inline float element(const std::array<std::array<uint32_t, 4>, 32>& a, int row, int k) {
  const uint32_t two = a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
  return half_value(uint16_t(two >> 16 * (k % 2)));
}

inline float half_at(const uint8_t* panel, int row, int column) {
  uint16_t half;
  std::memcpy(&half, panel + panel_offset(row, column / 8) + 2 * (column % 8), 2);
  return half_value(half);
}

// `a` (row, k) and `b` (column, k) are read when the product runs.
template <class A, class B>
void multiply(float (*d)[4], bool first, const A& a, const B& b) {
  const int lane = device::lane();
  const auto product = [=] {
    for (int n = 0; n < 8; ++n)
      for (int i = 0; i < 4; ++i) {
        double sum = first ? 0.0 : d[n][i];
        for (int k = 0; k < 16; ++k) sum += double(a(lane / 4 + 8 * (i / 2), k)) * b(8 * n + 2 * (lane % 4) + i % 2, k);
        d[n][i] = float(sum);
      }
  };
  if (device::cta->late) {
    device::self->products.push_back(product);
  } else {
    product();
  }
}

inline void multiply_by_keys(float (&d)[8][4], const uint8_t* a, const uint8_t* b, int step, bool first) {
  const int row = device::self->thread.x % 128 / 32 * 16;
  multiply(
      &d[0], first, [=](int i, int k) { return half_at(a, row + i, 16 * step + k); },
      [=](int key, int k) { return half_at(b, key, 16 * step + k); });
}

template <int kBlocks>
void multiply_by_values(float (&d)[kBlocks][4], int block, const uint32_t (&own)[4], const uint8_t* panel, int step) {
  const auto a = device::gathered(std::array<uint32_t, 4>{own[0], own[1], own[2], own[3]});
  multiply(
      &d[block], false, [=](int row, int k) { return element(a, row, k); },
      [=](int column, int k) { return half_at(panel, 16 * step + k, column); });
}

}  // namespace fp8cutlass::decode
