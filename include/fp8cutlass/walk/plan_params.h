// What the plan of a ragged batch gets, and how many threads it takes. Plain C++ without CUDA or torch headers.
#pragma once

#include "fp8cutlass/params.h"

namespace fp8cutlass::planning {

constexpr int kThreads = 1024;  // of its one CTA

struct PlanParams {
  RaggedBatch batch;
  int total_q, tile_m, key_block;
};

}  // namespace fp8cutlass::planning
