// The launch of the kernels that quantise and pack.
#pragma once

#include <cuda_runtime_api.h>

#include "registry.h"

namespace fp8cutlass {

// Launches `pack` on `stream` of `device`, which must be current: with a handover the form that delivers; else the
// maxima of groups that are larger than a block, then the blocks. Never synchronises. Throws where a launch fails.
void launch(const PackEntry& pack, PackParams params, int device, cudaStream_t stream);

// The kernel of an FP8 source: operands that are there, and descales that have a count.
void launch_fp8(const PackEntry& pack, Fp8PackParams params, int device, cudaStream_t stream);

// The forms for a ragged batch, which `pack` must have.
void launch_fp8_ragged(const PackEntry& pack, Fp8PackParams params, RaggedPack ragged, int device, cudaStream_t stream);
void launch_ragged(const PackEntry& pack, PackParams params, RaggedPack ragged, int device, cudaStream_t stream);

}  // namespace fp8cutlass
