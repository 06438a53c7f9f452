// What calls on FP8 operands ask of the kernel that copies them.
#pragma once

#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

// The compiled kernel for a variant's head_dim. Throws std::runtime_error where there is none.
const PackEntry& find_copies(const VariantEntry& variant);

// What it does with an operand (B, heads, tokens, D) of `rows` rows; `out` is null where it is read as it lies. Throws
// std::runtime_error where its rows cannot be read.
Fp8Operand copied(const View& x, const char* name, uint8_t* out, int64_t rows, bool flip);

}  // namespace fp8cutlass
