// The launch ABI of the kernels that quantise Q, K and V and pack V. Plain C++ without CUDA or torch headers.
#pragma once

#include <cstdint>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

// One operand: (B, heads, tokens, D) of bf16 or fp16 becomes e4m3 with descales, D filled up to the kernel's head_dim.
// All zeros where it is absent: without rows there are no CTAs for it.
struct PackOperand {
  const void* x;  // strides in elements, last dimension contiguous, 16-byte aligned rows
  int64_t stride_batch, stride_head, stride_row;
  uint8_t* out;  // Q and K: (B, heads, tokens, head_dim), dense rows; V: (B, heads, head_dim, rows), packed, contiguous
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // in bytes; unused for V
  float* descale;  // canonical shape of the granularity; per token (B, heads, rows), per channel (.., head_dim)
  float* amax;     // tensor, head, channel: largest finite |x| of each group, shape of `descale`, zeroed; or null
  Granularity granularity;  // what shares a descale
  int heads, tokens;
  int rows;                // tokens, or what the outputs are padded to: V, and K's descales of tokens
  float limit;             // what the largest |x| of a group becomes
  float limit_reciprocal;  // 1 / limit, rounded once
  int blocks, ctas;        // what is a CTA's, of a head, and CTAs in all; set by the launch
};

// The order in which CTAs take the operands: V is the longest work of a block, so it must not come last.
enum PackOrder { kPackV, kPackK, kPackQ, kPackOperands };

// How K and V reach an attention kernel that runs already: head after head. All multiprocessors pack the first blocks,
// a run for each CTA; then most leave, each to a CTA of the attention kernel, and a few pack the rest.
struct Handover {
  unsigned* counters;  // two zeroed words: runs of blocks drawn, CTAs that have left
  unsigned* ready;     // see ForwardParams; null: no handover, and a CTA for each block
  int sm_count;        // multiprocessors of the device
  int keep;            // of these: what packs the rest
  int head_blocks;     // blocks of V and of K of a head
  int blocks;          // of all heads
  int kept_ctas;       // set by the launch: what `keep` of them hold
};

constexpr int kPackThreads = 256;  // of a CTA, but where K and V are handed over

struct PackParams {
  PackOperand operand[kPackOperands];
  int batch;
  int head_dim;     // D, a multiple of 8, at most the kernel's
  float* k_mean;    // (B, Hkv, the kernel's head_dim), written: a mean of K that is subtracted from it; or null
  bool hadamard;    // rotate the rows of Q and K
  uint32_t q_flip;  // XORed onto four bytes of Q: 0x80808080 turns its sign, for a negative softmax scale
  Handover handover;
};

// What goes with the parameters of a ragged batch. `batch` of these is 1, and K and V become blocks as walk/ragged.h
// has them, of which an operand's `tokens` are the rows. Rows of O (tokens, heads, D) that belong to no sequence become
// zeros on the way, and their LSE -inf.
struct RaggedPack {
  RaggedBatch batch;
  void* out;
  int64_t row_bytes;  // of all heads of a token of O
  float* lse;         // (heads, tokens), or null
  int tokens, heads;  // of Q
  int first_cta;      // that looks for such rows; set by the launch
};

}  // namespace fp8cutlass
