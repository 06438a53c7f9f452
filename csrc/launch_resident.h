// Launches of the kernels that keep a head's K and V in shared memory. Without torch.
#pragma once

#include <cuda_runtime_api.h>

#include "fp8cutlass/resident_params.h"
#include "kernels.h"

namespace fp8cutlass {

// Fills in how row tiles are shared out among CTAs, and launches. Throws, naming the kernel, when that did not succeed.
void launch(const ResidentEntry& resident, ResidentForm form, ResidentParams params, int device, cudaStream_t stream);

}  // namespace fp8cutlass
