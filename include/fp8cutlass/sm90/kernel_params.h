// What a launch of an sm_90a kernel gets. The host fills it in (csrc/warpgroup.cpp, csrc/launch_pack.cpp).
#pragma once

#include <cuda.h>

#include "fp8cutlass/bias_params.h"
#include "fp8cutlass/pack_params.h"
#include "fp8cutlass/walk/listed.h"

namespace fp8cutlass::sm90 {

// A coordinate is multiplied by its step: 0 where a dimension is expanded (stride 0), for which tensor maps have no
// word. What every item reads lies in front of the order's phases: the first read of each 64 bytes waits
// (docs/lab/walk.md, row 43).
struct KernelParams {
  CUtensorMap q, k, v;
  ForwardParams p;
  int q_head_step, q_batch_step, k_head_step, k_batch_step;
  int want_lse;  // of unquantised P: asked for every tile, and one word takes fewer instructions than a pointer
  int extras;    // p.lse, p.amax or p.sinks is there: what an item's end seldom has to do
  Order order;
  TileMask mask;  // of kernels for lists of tiles
  Bias bias;      // of kernels that add one
};

constexpr int kDelivered = 2;  // operands that are handed over: V and K, the first of PackOrder
static_assert(kPackV < kDelivered && kPackK < kDelivered);
constexpr int kDeliveryRun = 2;  // blocks that are drawn at a time, as a draw takes long, too

// Of the kernel that hands K and V over.
struct DeliverParams {
  CUtensorMap source[kDelivered];
  CUtensorMap values;  // V^T, packed
  PackParams p;
  int head_step[kDelivered], batch_step[kDelivered];
};

}  // namespace fp8cutlass::sm90
