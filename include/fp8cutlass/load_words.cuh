// Loads from memory that nobody writes meanwhile.
#pragma once

#include <cstdint>

namespace fp8cutlass {

// Loads that keep their place among waits for products.
__device__ __forceinline__ uint32_t load_word(const void* pointer) {
  uint32_t word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(pointer));
  return word;
}

__device__ __forceinline__ uint32_t load_half_word(const void* pointer) {
  uint16_t half;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(half) : "l"(pointer));
  return half;
}

}  // namespace fp8cutlass
