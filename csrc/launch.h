// The launch of a compiled attention kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "mask_params.h"
#include "registry.h"

namespace fp8cutlass {

// Fills in what depends on the card and launches `variant` on `stream` of `device`, which must be current; before it
// the plan, where it walks a ragged batch. `mask` is for kernels of lists and biases. Throws where a launch fails.
void launch(const VariantEntry& variant, ForwardParams& params, int device, cudaStream_t stream,
            const MaskParams& mask = {});

}  // namespace fp8cutlass
