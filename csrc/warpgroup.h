// The launch of a kernel of the family sm90a: tensor maps, the order of work, and a persistent grid or clusters.
#pragma once

#include <cuda_runtime_api.h>

#include "mask_params.h"
#include "registry.h"

namespace fp8cutlass {

// Launches `variant` on `stream` of `device`, which must be current. Never synchronises. Throws where the kernel cannot
// be loaded.
cudaError_t launch_warpgroup(const VariantEntry& variant, const ForwardParams& p, const MaskParams& mask, int device,
                             cudaStream_t stream);

}  // namespace fp8cutlass
