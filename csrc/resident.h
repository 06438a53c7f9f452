// Calls from bf16 or fp16 to the result by a kernel that keeps a head's K and V in shared memory.
#pragma once

#include "attend.h"
#include "attend_ragged.h"

namespace fp8cutlass {

// Launches it on the current stream and returns the result, as `attend` does. It computes what `variant` computes from
// packed operands: descales of rows of Q, and of blocks of K and V. Throws std::runtime_error naming the argument.
Tensor attend_resident(const AttendConstants& constants, const AttendTensors& tensors, const VariantEntry& variant);

// The same of a ragged batch, as `attend_ragged` has it; kernel number `resident`, whose most keys are all that it
// reads of a sequence.
Tensor attend_resident_ragged(const RaggedNumbers& numbers, const RaggedTensors& tensors, const VariantEntry& variant,
                              int64_t resident);

}  // namespace fp8cutlass
