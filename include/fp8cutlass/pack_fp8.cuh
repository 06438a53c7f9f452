// Parts of the kernels that bring FP8 operands to where attention kernels read them. Their sum is
// python/fp8cutlass/quant/v_layout.py, descale.py and lower.py: bytes and descales change their places, and rows of Q
// may be divided by powers of two.
//
// A row of head_dim bytes is shared by kLanes neighbouring lanes. A chunk is 16 bytes; lane l owns the chunks l,
// l + kLanes, ..., so that the lanes of a row always touch one contiguous piece of memory.
#pragma once

#include "fp8cutlass/lower.cuh"
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
  int batch, head;      // batch element or sequence, and head; of Q of a ragged batch the sequence is each row's own
};

// Of a dense batch. `block.head` counts those of all batch elements.
__device__ __forceinline__ Fp8Rows rows_of(const Fp8Operand& o, const Block& block, int rows) {
  const int base = block.index * rows;
  const int batch = block.head / o.heads, head = block.head % o.heads;
  const uint8_t* const from = o.x + batch * o.stride_batch + head * o.stride_head;
  return {from, base, o.tokens, base, o.rows - base, batch, head};
}

// As it was given, of a batch element or sequence, a head and a part.
__device__ __forceinline__ float given_descale(const Fp8Descale& d, int batch, int head, int part) {
  if (part >= d.given) return 1.f;
  return d.x == nullptr ? d.value : __ldg(d.x + batch * d.stride_batch + head * d.stride_head + part * d.stride_part);
}

// Q: each row is lowered by itself. `sequence_of` tells the batch element or sequence of a row.
template <int kLanes, int kPasses, int kChunks, class SequenceOf>
__device__ __forceinline__ void lower_rows(uint4 (&x)[kPasses][kChunks], const Fp8Descale& d, const Fp8Rows& of,
                                           int made_head, const SequenceOf& sequence_of) {
  constexpr int kBits = 4;  // of a row's octaves
  static_assert(kBits * kPasses <= 32 && kChunks <= kExactSums);
  uint32_t octaves = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum += sum_of_magnitudes(x[pass][i]);
    uint32_t units = uint32_t(fminf(sum * 0x1p9f, 0x1p27f));  // a sum of these is exact; no row has as many as a NaN
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) units += __shfl_xor_sync(~0u, units, step);
    const int own = octaves_above<16 * kLanes * kChunks>(float(units) * 0x1p-9f);
    octaves |= uint32_t(own) << kBits * pass;
    if (own == 0) continue;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) divide(x[pass][i], divisor_of(own, 0));
  }
  if (threadIdx.x % kLanes != 0) return;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass, octaves >>= kBits) {
    const int row = of.base + int(threadIdx.x) / kLanes + pass * (kThreads / kLanes);
    if (row >= of.tokens) break;
    d.out[int64_t{made_head} * d.parts + row] =
        given_descale(d, sequence_of(row), of.head, row) * power_of_two(int(octaves & ((1u << kBits) - 1)));
  }
}

// Spreads the descales of all operands over the shapes that attention kernels read. CTA `cta` of `ctas` comes here.
__device__ __forceinline__ void spread_descales(const Fp8PackParams& p, int cta, int ctas) {
#pragma unroll 1
  for (int operand = 0; operand < kPackOperands; ++operand) {
    const Fp8Descale& d = p.descale[operand];
#pragma unroll 1
    for (int64_t i = int64_t{cta} * kThreads + threadIdx.x; i < d.count; i += int64_t{ctas} * kThreads) {
      const unsigned head = unsigned(i) / unsigned(d.parts), part = unsigned(i) % unsigned(d.parts);
      d.out[i] = given_descale(d, int(head / unsigned(d.heads)), int(head % unsigned(d.heads)), int(part));
    }
  }
}

}  // namespace fp8cutlass::packing
