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

// Whether Q is lowered for a kernel whose quantised operands may not exceed `amax`: not where all e4m3 numbers may be
// there.
bool lowers(double amax);

// Whether the attention kernel lowers Q itself, so that it is not copied: not beside three warpgroups that compute,
// which leave no registers for it.
bool lowers_query(const VariantEntry& variant, const View& q);

// Has it do so. `early`: no kernel before it in the stream, that has not ended, writes Q or its descales.
void lower_query(QueryScaling& query, double amax, double scale, bool early);

}  // namespace fp8cutlass
