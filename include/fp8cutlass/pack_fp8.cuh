// Parts of the kernels that bring FP8 operands to where attention kernels read them. Their sum is
// python/fp8cutlass/quant/v_layout.py and descale.py: bytes and descales change their places, nothing is computed.
//
// A row of head_dim bytes is shared by kLanes neighbouring lanes. A chunk is 16 bytes; lane l owns the chunks l,
// l + kLanes, ..., so that the lanes of a row always touch one contiguous piece of memory.
#pragma once

#include "fp8cutlass/pack_fp8_params.h"
#include "fp8cutlass/pack_ragged.cuh"

namespace fp8cutlass::packing {

// A lane's chunks of rows first, first + kThreads / kLanes, ... of a block that starts at row `base`. `rows` is row 0
// of the head. Rows past the last token and columns past D are zeros.
template <int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void load_bytes(uint4 (&x)[kPasses][kChunks], const uint8_t* rows, int64_t stride_row,
                                           int base, int tokens, int head_dim) {
  const int lane = threadIdx.x % kLanes, first = base + int(threadIdx.x) / kLanes;
  const uint8_t* row = rows + first * stride_row + 16 * lane;
  const int64_t step = kThreads / kLanes * stride_row;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass, row += step) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool inside = first + pass * (kThreads / kLanes) < tokens && 16 * (lane + kLanes * i) < head_dim;
      x[pass][i] = inside ? __ldg(reinterpret_cast<const uint4*>(row + 16 * kLanes * i)) : uint4{0, 0, 0, 0};
    }
  }
}

// Q and K: rows stay rows, of kHeadDim bytes. `rows` is row 0 of the head.
template <int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void store_bytes(uint8_t* rows, const uint4 (&x)[kPasses][kChunks], int base, int tokens,
                                            uint32_t flip) {
  const int lane = threadIdx.x % kLanes, first = base + int(threadIdx.x) / kLanes;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first + pass * (kThreads / kLanes);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4& c = x[pass][i];
      if (row < tokens)
        *reinterpret_cast<uint4*>(rows + int64_t{row} * kHeadDim + 16 * (lane + kLanes * i)) =
            uint4{c.x ^ flip, c.y ^ flip, c.z ^ flip, c.w ^ flip};
    }
  }
}

// V: into shared memory, from which store_packed takes columns.
template <class Stage, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void stage_bytes(uint8_t* stage, const uint4 (&x)[kPasses][kChunks]) {
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first + pass * (kThreads / kLanes);
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      *reinterpret_cast<uint4*>(stage + Stage::offset(row, row % 16, 16 * (lane + kLanes * i))) = x[pass][i];
  }
}

// A CTA's rows of an operand, and where they go.
struct Fp8Rows {
  const uint8_t* rows;  // row 0 of the sequence and head
  int base, tokens;     // the first row; past `tokens` there are none
  int to, room;         // of packed V: the first column, and how many are the CTA's
};

// Of a dense batch. `block.head` counts those of all batch elements.
__device__ __forceinline__ Fp8Rows rows_of(const Fp8Operand& o, const Block& block, int rows) {
  const int base = block.index * rows, batch = block.head / o.heads, head = block.head % o.heads;
  return {o.x + batch * o.stride_batch + head * o.stride_head, base, o.tokens, base, o.rows - base};
}

// Of a ragged one: V's blocks of keys are cut into CTAs, and Q and K stay as they are. All lanes of a warp come here.
__device__ __forceinline__ Fp8Rows rows_of(const Fp8PackParams& p, const RaggedBatch& batch, const Block& block,
                                           int rows) {
  const Fp8Operand& o = p.operand[block.operand];
  if (block.operand != kPackV) return rows_of(o, block, rows);
  const int parts = (p.key_block + rows - 1) / rows, number = block.index / parts, part = block.index % parts * rows;
  const BlockKeys keys = keys_of_block(batch, number, p.key_block);
  return {o.x + block.head * o.stride_head + keys.first * o.stride_row, keys.begin + part, keys.count,
          number * p.key_block + part, p.key_block - part};
}

// Spreads the descales of all operands over the shapes that attention kernels read. CTA `cta` of `ctas` comes here.
__device__ __forceinline__ void spread_descales(const Fp8PackParams& p, int cta, int ctas) {
#pragma unroll 1
  for (int operand = 0; operand < kPackOperands; ++operand) {
    const Fp8Descale& d = p.descale[operand];
#pragma unroll 1
    for (int64_t i = int64_t{cta} * kThreads + threadIdx.x; i < d.count; i += int64_t{ctas} * kThreads) {
      const unsigned head = unsigned(i) / unsigned(d.parts), part = unsigned(i) % unsigned(d.parts);
      const int64_t at = int64_t(head / unsigned(d.heads)) * d.stride_batch +
                         int64_t(head % unsigned(d.heads)) * d.stride_head + part * d.stride_part;
      d.out[i] = int(part) >= d.given ? 1.f : d.x == nullptr ? d.value : __ldg(d.x + at);
    }
  }
}

}  // namespace fp8cutlass::packing
