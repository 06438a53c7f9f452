// The products of P and of the part of V^T that has the 8 rows of ones: 72, 104 or 136 columns, k32, sums in float32.
//
// CuTe has these widths too, among all others, in a header of 2.8 MB. To read it took a seventh of the time that a
// kernel compiles.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>

namespace fp8cutlass::sm90 {

enum class ValueType { E4M3, E5M2 };

// O = P V or O += P V for 64 rows, used as CuTe's atoms are, but for O, which is an array. kColumns: of V alone.
template <int kColumns, ValueType kType>
struct ValuesWithOnes;

// `each` of the operands of a product that are sums, but the first: an asm statement calls them by number.
#define FP8CUTLASS_TEN(each, ten)                                                                                      \
  each(ten##0) each(ten##1) each(ten##2) each(ten##3) each(ten##4) each(ten##5) each(ten##6) each(ten##7) each(ten##8) \
      each(ten##9)
#define FP8CUTLASS_TO_35(each)                                                                    \
  each(1) each(2) each(3) each(4) each(5) each(6) each(7) each(8) each(9) FP8CUTLASS_TEN(each, 1) \
      FP8CUTLASS_TEN(each, 2) each(30) each(31) each(32) each(33) each(34) each(35)
#define FP8CUTLASS_TO_51(each) \
  FP8CUTLASS_TO_35(each) each(36) each(37) each(38) each(39) FP8CUTLASS_TEN(each, 4) each(50) each(51)
#define FP8CUTLASS_TO_67(each)                                                                                         \
  FP8CUTLASS_TO_51(each)                                                                                               \
  each(52) each(53) each(54) each(55) each(56) each(57) each(58) each(59) each(60) each(61) each(62) each(63) each(64) \
      each(65) each(66) each(67)
#define FP8CUTLASS_NAME(i) ", %" #i
#define FP8CUTLASS_SUM(i) , "+f"(o[i])

// p0 to adds: numbers of the operands behind the sums.
#define FP8CUTLASS_VALUES(columns, shape, type, name, sums, to, p0, p1, p2, p3, v, adds)                                \
  template <>                                                                                                           \
  struct ValuesWithOnes<columns, ValueType::type> {                                                                     \
    using CRegisters = float[sums];                                                                                     \
    static __device__ __forceinline__ void fma(uint32_t const& a0, uint32_t const& a1, uint32_t const& a2,              \
                                               uint32_t const& a3, uint64_t const& b, float* o,                         \
                                               cute::SM90::GMMA::ScaleOut scale) {                                      \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #adds ", 0;\n"                                                         \
          "wgmma.mma_async.sync.aligned." shape "k32.f32.e4m3." name " {%0" to(FP8CUTLASS_NAME) "}, "                  \
          "{%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #v ", p, 1, 1;\n}\n"                                          \
          : "+f"(o[0]) to(FP8CUTLASS_SUM)                                                                             \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int32_t(scale))); \
    }                                                                                                                   \
  };
FP8CUTLASS_VALUES(64, "m64n72", E4M3, "e4m3", 36, FP8CUTLASS_TO_35, 36, 37, 38, 39, 40, 41)
FP8CUTLASS_VALUES(64, "m64n72", E5M2, "e5m2", 36, FP8CUTLASS_TO_35, 36, 37, 38, 39, 40, 41)
FP8CUTLASS_VALUES(96, "m64n104", E4M3, "e4m3", 52, FP8CUTLASS_TO_51, 52, 53, 54, 55, 56, 57)
FP8CUTLASS_VALUES(96, "m64n104", E5M2, "e5m2", 52, FP8CUTLASS_TO_51, 52, 53, 54, 55, 56, 57)
FP8CUTLASS_VALUES(128, "m64n136", E4M3, "e4m3", 68, FP8CUTLASS_TO_67, 68, 69, 70, 71, 72, 73)
FP8CUTLASS_VALUES(128, "m64n136", E5M2, "e5m2", 68, FP8CUTLASS_TO_67, 68, 69, 70, 71, 72, 73)
#undef FP8CUTLASS_VALUES

}  // namespace fp8cutlass::sm90
