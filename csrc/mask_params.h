// What a launch gets beside its operands. Plain C++.
#pragma once

#include "fp8cutlass/bias_params.h"
#include "fp8cutlass/walk/tile_mask.h"

namespace fp8cutlass {

struct MaskParams {
  TileMask lists;  // of a variant that walks them
  Bias bias;       // of one that adds it
};

}  // namespace fp8cutlass
