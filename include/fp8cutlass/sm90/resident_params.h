// What a launch of a kernel gets that keeps a head's K and V in shared memory.
#pragma once

#include <cuda.h>

#include "fp8cutlass/resident_params.h"

namespace fp8cutlass::sm90 {

// A coordinate is multiplied by its step: 0 where a dimension is expanded (stride 0), for which tensor maps have no
// word.
struct ResidentLaunch {
  CUtensorMap q, k, v;
  ResidentParams params;
  int q_head_step, q_batch_step, k_head_step, k_batch_step, v_head_step, v_batch_step;
};

}  // namespace fp8cutlass::sm90
