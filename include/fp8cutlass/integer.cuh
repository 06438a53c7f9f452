// Single instructions of kernels whose scores are integers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp8cutlass {

// What products are added to, from shared memory: an instruction sets four sums, where constants would take one each.
// Volatile, or the compiler would load once and copy.
template <int kBlocks>
__device__ __forceinline__ void raise(uint32_t (&s)[kBlocks][4], const uint32_t (&four)[4]) {
  const auto from = uint32_t(__cvta_generic_to_shared(four));
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(s[n][0]), "=r"(s[n][1]), "=r"(s[n][2]), "=r"(s[n][3])
                 : "r"(from));
}

// Maximum and minimum that are NaN where an argument is.
__device__ __forceinline__ float most_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float least_or_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// Four floats rounded to even and held in [0, 255], NaN as 0; a in the lowest byte.
__device__ __forceinline__ uint32_t u8x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t r;
  asm("{\n.reg .s32 a, b, c, d;\n"
      "cvt.rni.s32.f32 a, %1;\n"
      "cvt.rni.s32.f32 b, %2;\n"
      "cvt.rni.s32.f32 c, %3;\n"
      "cvt.rni.s32.f32 d, %4;\n"
      "cvt.pack.sat.u8.s32.b32 %0, d, c, 0;\n"
      "cvt.pack.sat.u8.s32.b32 %0, b, a, %0;\n}"
      : "=r"(r)
      : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)), "f"(__uint_as_float(c)), "f"(__uint_as_float(d)));
  return r;
}

}  // namespace fp8cutlass
