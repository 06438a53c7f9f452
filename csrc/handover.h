// When the kernel that packs hands over head after head to an attention kernel that runs already.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "fp8cutlass/pack_params.h"

namespace fp8cutlass {

// Sets up a handover between the launches of both kernels, one after the other on `stream` of `device`, which must be
// current; `pack` is of a kernel that delivers blocks of key_block keys. There is one where the lock is held, until
// both are launched; that takes a Q that the attention kernel quantises, K and V with block descales that are not
// transformed, and counters. Then, once the first is launched, the other has to be, or take_back called.
std::unique_lock<std::mutex> hand_over(PackParams& pack, ForwardParams& params, int key_block, int device,
                                       cudaStream_t stream);

// Where the attention kernel could not be launched: what it would have left zeroed.
void take_back(const ForwardParams& params, cudaStream_t stream);

}  // namespace fp8cutlass
