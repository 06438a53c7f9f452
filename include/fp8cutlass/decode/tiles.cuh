// What passes between the warps that convert keys and the warpgroup that multiplies them: two tiles in turn.
#pragma once

#include "fp8cutlass/decode/warpgroup.cuh"
#include "fp8cutlass/delay.cuh"

namespace fp8cutlass::decode {

// Keys of a warpgroup in f16, and their descales where tokens have them.
template <int kHeadDim>
struct alignas(1024) KeyTile {
  uint8_t k[kHeadDim / 64][kPanelBytes], v[kHeadDim / 64][kPanelBytes];
  float k_descale[kGroupKeys], v_descale[kGroupKeys];
};

struct Handoff {
  Barrier there[2], free[2];
  int has_nan[4];

  // All 128 threads of four warps arrive at each: racecheck follows arrivals lane by lane.
  __device__ __forceinline__ void begin() {
    for (int i = 0; i < 2; ++i) init(there[i], 128), init(free[i], 128);
  }
};

}  // namespace fp8cutlass::decode
