// What a kernel that copies FP8 operands is launched with.
#pragma once

#include <cstdint>

#include "fp8cutlass/pack_params.h"

namespace fp8cutlass {

// FP8 operands: what an attention kernel reads of them is copied to where it reads it. Bytes stay as they are, but for
// the sign of Q.
struct Fp8Operand {
  const uint8_t* x;  // (B, heads, tokens, D), strides in bytes, last dimension contiguous, 16-byte aligned rows
  int64_t stride_batch, stride_head, stride_row;
  uint8_t* out;  // Q and K: (B, heads, tokens, head_dim), contiguous; V: (B, heads, head_dim, rows), packed, contiguous
  int heads, tokens;
  int rows;       // tokens, or what V is padded to
  uint32_t flip;  // XORed onto four bytes
  int blocks,
      ctas;  // what is a CTA's, of a head, and CTAs in all, 0 where the operand is read as it lies; set by the launch
};

// Descales that are not in memory as an attention kernel reads them: (batch, heads, parts) of one number, or of a
// tensor with any strides.
struct Fp8Descale {
  const float* x;  // or null: `value`
  float value;
  int64_t stride_batch, stride_head, stride_part;
  float* out;  // contiguous
  int heads, parts;
  int given;  // of the parts; the rest become ones
  int count;  // in all, 0 where they are read as they lie
};

struct Fp8PackParams {
  Fp8Operand operand[kPackOperands];
  Fp8Descale descale[kPackOperands];
  int batch;
  int head_dim;   // D, a multiple of 16, at most the kernel's
  int first_cta;  // that looks after descales; set by the launch
  int key_block;  // of a ragged batch: keys of a block of V, a multiple of 64
};

}  // namespace fp8cutlass
