// The launch of one compiled attention kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

// Fills in what depends on the card and launches `variant` on `stream` of `device`, which must be current. Throws where
// the launch fails.
void launch(const VariantEntry& variant, ForwardParams& params, int device, cudaStream_t stream);

}  // namespace fp8cutlass
