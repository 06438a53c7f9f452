// CUDA C++ as host C++: what the kernels of paged caches use of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.h"

#define __global__ static
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (device::self->thread)
#define blockIdx (device::Index{device::cta->block})

using std::max;
using std::min;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int32_t x) { return __uint_as_float(static_cast<uint32_t>(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t order) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(bytes >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}

// Of two 16-bit numbers each.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
inline uint32_t __vcmpgeu2(uint32_t a, uint32_t b) {
  return ((a & 0xffff) >= (b & 0xffff) ? 0xffff : 0) | ((a >> 16) >= (b >> 16) ? 0xffff0000u : 0);
}

// Each is rounded on its own: -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }

template <class T>
T __shfl_sync(unsigned, T x, int from) {
  return device::gathered(x)[from % 32];
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return device::gathered(x)[device::lane() ^ mask];
}
template <class T>
T __shfl_up_sync(unsigned, T x, int step) {
  const auto all = device::gathered(x);
  return device::lane() >= step ? all[device::lane() - step] : x;
}
inline int __any_sync(unsigned, bool x) {
  for (const bool y : device::gathered(x))
    if (y) return 1;
  return 0;
}
inline int __all_sync(unsigned, bool x) {
  for (const bool y : device::gathered(x))
    if (!y) return 0;
  return 1;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto all = device::gathered(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline void __syncwarp() { device::meet(device::own_warp()); }
inline void __syncthreads() { device::meet(device::cta->all); }
inline void __threadfence() {}
template <class T>
T atomicMax(T* p, T x) {
  const T old = *p;
  *p = max(old, x);
  return old;
}
template <class T>
T atomicMin(T* p, T x) {
  const T old = *p;
  *p = min(old, x);
  return old;
}
inline unsigned atomicAdd(unsigned* p, unsigned x) {
  const unsigned old = *p;
  *p += x;
  return old;
}
