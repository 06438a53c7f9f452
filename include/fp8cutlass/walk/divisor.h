// Division by a number that the host knows before the kernel starts, as a product and a shift. Host-callable.
// (cutlass::FastDivmod is the same, but its header takes half a second to compile.)
#pragma once

#include <cstdint>

#include "fp8cutlass/host_device.h"

namespace fp8cutlass {

// For quotients of numbers from 0 to 2^31 - 1. `multiplier` is ceil(2^(32 + shift) / divisor) with the smallest shift
// for which 2^(shift + 1) >= divisor: so it has 32 bits, and quotients are too large by less than 2^-31 of them.
// (Granlund and Montgomery, Division by invariant integers using multiplication, 1994.)
struct Divisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0, shift = 0;  // unused for 1

  constexpr Divisor() = default;
  FP8_HOST_DEVICE Divisor(int number) : divisor(number) {
    if (number == 1) return;
    int bits = 0;
    while ((int64_t(1) << bits) < number) ++bits;
    multiplier = uint32_t(((uint64_t(1) << (31 + bits)) + uint32_t(number) - 1) / uint32_t(number));
    shift = uint32_t(bits - 1);
  }

  FP8_HOST_DEVICE int div(int n) const {
#ifdef __CUDA_ARCH__
    return divisor != 1 ? __umulhi(n, multiplier) >> shift : n;
#else
    return divisor != 1 ? int((int64_t(n) * multiplier >> 32) >> shift) : n;
#endif
  }

  FP8_HOST_DEVICE void operator()(int& quotient, int& rest, int n) const {
    quotient = div(n);
    rest = n - quotient * divisor;
  }
};

}  // namespace fp8cutlass
