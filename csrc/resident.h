// One call from bf16 or fp16 to the result by a kernel that keeps a head's K and V in shared memory.
#pragma once

#include "attend.h"

namespace fp8cutlass {

// Launches it on the current stream and returns the result, as `attend` does. It computes what `variant` computes from
// packed operands: descales of rows of Q, and of blocks of K and V. Throws std::runtime_error naming the argument.
Tensor attend_resident(const AttendConstants& constants, const AttendTensors& tensors, const VariantEntry& variant);

}  // namespace fp8cutlass
