// The two matrix products of a warpgroup (64 query rows) on one KV tile, as asynchronous wgmma.
//
// Accumulators are those of m16n8 per warp: lane = 4 * group + t holds rows group and group + 8 of its warp's 16 and
// columns 2t, 2t + 1 of each n8 block; so softmax.cuh and epilogue.cuh work on them as they are, and packed P is the A
// operand of P V.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

#include "fp8cutlass/sm90/values.cuh"

namespace fp8cutlass::sm90 {

using cute::SM90::GMMA::ScaleOut;

template <class Atom, class Reg, size_t... kIndex, class... Operand>
__device__ __forceinline__ void fma(std::index_sequence<kIndex...>, ScaleOut scale, Reg* d, const Operand&... operand) {
  Atom::fma(operand..., d[kIndex]..., scale);
}

// d = A B for the first product of a chain, d += A B for the others.
template <class Atom, class Reg, class... Operand>
__device__ __forceinline__ void multiply(Reg* d, bool first, const Operand&... operand) {
  const ScaleOut scale = first ? ScaleOut::Zero : ScaleOut::One;
  if constexpr (std::is_invocable_v<decltype(Atom::fma), Operand..., Reg*, ScaleOut>) {
    Atom::fma(operand..., d, scale);
  } else {
    constexpr size_t kRegs = std::extent<typename Atom::CRegisters>::value;
    fma<Atom>(std::make_index_sequence<kRegs>(), scale, d, operand...);
  }
}

// S = Q K^T from shared memory, from n8 block `first` on; S += Q K^T with kAdds. `q` is the descriptor of this
// warpgroup's first row.
template <class Atom, class QTile, class KTile, bool kAdds = false, class Acc, int kBlocks, int kRegs>
__device__ __forceinline__ void issue_scores(Acc (&s)[kBlocks][kRegs], uint32_t q, uint32_t k, int first = 0) {
#pragma unroll
  for (int step = 0; step < QTile::kSteps; ++step)
    multiply<Atom>(&s[first][0], step == 0 && !kAdds, QTile::complete(q + QTile::advance(0, step)),
                   KTile::complete(k + KTile::advance(0, step)));
}

// T = P V^T for the rows of V^T from `row` on, as many as the atom is wide; P comes from registers, the keys of V^T lie
// in one tile or in several. P has as many steps as V; or twice as many, two terms for the same keys one after the
// other; or fewer, and the keys behind are not multiplied.
template <class Atom, class VTile, int kBlocks, int kSteps, int kTiles>
__device__ __forceinline__ void issue_values(float (&t)[kBlocks][4], const uint32_t (&p)[kSteps][4],
                                             const uint32_t (&v)[kTiles], int row = 0) {
  static_assert(std::extent<typename Atom::CRegisters>::value <= kBlocks * 4);
  constexpr int kMost = kTiles * VTile::kSteps, kTerms = kSteps > kMost ? 2 : 1;
  static_assert(kSteps <= kMost || kSteps == kTerms * kMost);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int keys = step / kTerms;
    multiply<Atom>(&t[0][0], step == 0, p[step][0], p[step][1], p[step][2], p[step][3],
                   VTile::complete(v[keys / VTile::kSteps] + VTile::advance(row, keys % VTile::kSteps)));
  }
}

// Registers that a wgmma reads or writes while it runs: no access may move across this point. Without it the compiler
// moves copies between the products and then has to wait after each of them.
template <class Reg, int kBlocks, int kRegs>
__device__ __forceinline__ void fence(Reg (&x)[kBlocks][kRegs]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < kRegs; ++i) cute::warpgroup_fence_operand(x[n][i]);
}

}  // namespace fp8cutlass::sm90
