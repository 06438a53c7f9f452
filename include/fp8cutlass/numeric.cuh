// Single instructions that C++ has no name for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace fp8cutlass {

// threadIdx.x, read afresh: what is derived from it is then computed where it is used instead of being held in
// registers across the main loop (the compiler hoists every invariant address otherwise, which costs some 40 registers,
// and spills).
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Where a place in shared memory is, as instructions name it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Kernels of a stream that run beside each other, which sm_90 was the first to do. The next one may begin, which waits
// for this one.
__device__ __forceinline__ void dependents_may_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// What the one before wrote is there from here on, and it reads no more.
__device__ __forceinline__ void wait_for_operands() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `for (int turn = unpredicated(condition); turn > 0; --turn)` is an if that stays a branch: the assembler cannot know
// that the loop turns once at most. As an if, it would predicate the block, and a hundred instructions would be issued
// for nothing.
__device__ __forceinline__ int unpredicated(bool condition) {
  int x = condition;
  asm volatile("" : "+r"(x));
  return x;
}

// The same number, of which the compiler knows nothing any more: neither where it comes from nor that it never changes.
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a score in float32 or s32 becomes whose key is not seen: -inf, whose bits are an integer less than any s32
// score.
template <class Score>
constexpr Score kHiddenScore = -INFINITY;
template <>
constexpr uint32_t kHiddenScore<uint32_t> = 0xFF800000u;

constexpr uint32_t kHalf2NegInf = 0xFC00FC00u;  // -inf, -inf

// Two halves, -inf where the bits of `where` are set.
__device__ __forceinline__ uint32_t hide(uint32_t s, uint32_t where) { return (s & ~where) | (kHalf2NegInf & where); }

// A byte of `a` and `b`, 0 to 7, for each hex digit of `which` from the lowest on; with 8 added, its sign in all bits.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(which));
  return x;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To 2^-11 of the result.
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t half2_fma_relu(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ uint32_t half2_add(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t half2_multiply(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t half2_max(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// All bits of a half where a < b, none where not.
__device__ __forceinline__ uint32_t half2_less(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// An integer in [0, 2048] in both halves.
constexpr __host__ __device__ uint32_t half2_of(int value) {
  int exponent = 0;
  while (value >> (exponent + 1) != 0) ++exponent;
  const uint32_t bits = value == 0 ? 0u : uint32_t(exponent + 15) << 10 | (uint32_t(value) << 10 >> exponent & 0x3ffu);
  return bits * 0x10001u;
}

__device__ __forceinline__ float half_low(uint32_t a) { return __half2float(__ushort_as_half(uint16_t(a))); }
__device__ __forceinline__ float half_high(uint32_t a) { return __half2float(__ushort_as_half(uint16_t(a >> 16))); }

// Four floats to four e4m3 bytes, round to nearest even, saturating at 448; a in the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  uint32_t r;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// The same of four halves.
__device__ __forceinline__ uint32_t e4m3x4(uint32_t ab, uint32_t cd) {
  uint32_t r;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(r)
      : "r"(ab), "r"(cd));
  return r;
}

// Four floats of magnitude 448 at most to two e4m3 numbers each: the nearest one, and the nearest to what that left. By
// way of f16, of which an instruction takes two, and in which the difference is exact; a in the lowest bytes.
__device__ __forceinline__ void e4m3x4_terms(uint32_t& low, uint32_t& high, float a, float b, float c, float d) {
  asm("{\n.reg .b16 h0, h1, l0, l1;\n"
      ".reg .b32 x0, x1, y0, y1;\n"
      "cvt.rn.f16x2.f32 x0, %3, %2;\n"
      "cvt.rn.f16x2.f32 x1, %5, %4;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 h0, x0;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 h1, x1;\n"
      "cvt.rn.f16x2.e4m3x2 y0, h0;\n"
      "cvt.rn.f16x2.e4m3x2 y1, h1;\n"
      "sub.rn.f16x2 x0, x0, y0;\n"
      "sub.rn.f16x2 x1, x1, y1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 l0, x0;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 l1, x1;\n"
      "mov.b32 %0, {l0, l1};\n"
      "mov.b32 %1, {h0, h1};\n}"
      : "=r"(low), "=r"(high)
      : "f"(a), "f"(b), "f"(c), "f"(d));
}

__device__ __forceinline__ uint32_t bf16x2(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ uint32_t fp16x2(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// Maximum over the four lanes that share an accumulator row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace fp8cutlass
