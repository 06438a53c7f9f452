// What the kernels that quantise and pack ask of a ragged batch: which keys a block is made of, and which rows of the
// result belong to no sequence. Bit for bit what python/fp8cutlass/ragged.py makes by torch operations.
#pragma once

#include "fp8cutlass/pack.cuh"
#include "fp8cutlass/walk/lengths.cuh"

namespace fp8cutlass::packing {

// The keys of a block: `first` is the first token of its sequence, which has `count`, and the block begins with number
// `begin` of these. Of a block that is no sequence's there are none.
struct BlockKeys {
  int first, count, begin;
  int sequence;
};

// All lanes of a warp come here.
__device__ __forceinline__ BlockKeys keys_of_block(const RaggedBatch& batch, int block, int key_block) {
  const int s = last_begun(batch.sequences, block,
                           [&](int i) { return block_at(between(batch.cu_k[i], 0, batch.key_tokens), i, key_block); });
  const Span keys = keys_at(batch, s);
  const int begin = (block - block_at(keys.first, s, key_block)) * key_block;
  const bool there = begin >= 0 && begin < keys.count;
  return {keys.first, there ? keys.count : 0, there ? begin : 0, s};
}

// Makes `o`, K or V, the keys of the sequence that block number `block` belongs to, and returns which of them the block
// begins with.
template <int kKeyBlock>
__device__ __forceinline__ int find_keys(PackOperand& o, const RaggedBatch& batch, int block) {
  const BlockKeys keys = keys_of_block(batch, block, kKeyBlock);
  o.x = static_cast<const uint16_t*>(o.x) + keys.first * o.stride_row;
  o.tokens = keys.count;
  return keys.begin;
}

// The last from `least` to `most` that begins at `x` or before, if `least` does. Each thread looks for itself.
template <class Begin>
__device__ __forceinline__ int last_begun_alone(int least, int most, int x, const Begin& begin) {
#pragma unroll 1
  while (least < most) {
    const int middle = least + (most - least + 1) / 2;
    if (begin(middle) <= x)
      least = middle;
    else
      most = middle - 1;
  }
  return least;
}

// The sequence of a token of Q, where descales of sequences lie `step` apart; 0 where they share one. Each thread looks
// for itself.
__device__ __forceinline__ int sequence_of(const RaggedPack& r, int64_t step, int token) {
  const auto begin = [&](int s) { return between(r.batch.cu_q[s], 0, r.tokens); };
  return step == 0 ? 0 : last_begun_alone(0, r.batch.sequences - 1, token, begin);
}

// Of 32 tokens from `first` on, the rows of O that belong to no sequence become zeros, and their LSE -inf. All others
// are the attention kernel's. A warp comes together, and each lane looks after a token.
__device__ __forceinline__ void clear_rows_from(const RaggedPack& r, int first) {
  const RaggedBatch& batch = r.batch;
  const int lane = threadIdx.x % 32;
  if (first >= r.tokens) return;
  const auto begin = [&](int s) { return between(batch.cu_q[s], 0, r.tokens); };
  const int least = last_begun(batch.sequences, first, begin);
  const int token = first + lane;
  // Nearly always the 32 tokens lie in one sequence. Else each lane looks among those between.
  const int last = min(first + 31, r.tokens - 1);
  const Span span = rows_at(batch, r.tokens, least);
  if (first >= span.first && last < span.first + span.count) return;
  const int own = last_begun_alone(least, last_begun(batch.sequences, last, begin), token, begin);
  const Span rows = rows_at(batch, r.tokens, own);
  const bool is_dead = token < r.tokens && (token < rows.first || token >= rows.first + rows.count);
#pragma unroll 1
  for (unsigned dead = __ballot_sync(~0u, is_dead); dead != 0; dead &= dead - 1) {
    const int64_t row = first + __ffs(int(dead)) - 1;
    uint4* out = reinterpret_cast<uint4*>(static_cast<uint8_t*>(r.out) + row * r.row_bytes);
#pragma unroll 1
    for (int i = lane; i < r.row_bytes / 16; i += 32) out[i] = uint4{0, 0, 0, 0};
    if (r.lse == nullptr) continue;
#pragma unroll 1
    for (int head = lane; head < r.heads; head += 32) r.lse[int64_t{head} * r.tokens + row] = -INFINITY;
  }
}

// The same of as many tokens as a CTA has threads.
__device__ __forceinline__ void clear_rows(const RaggedPack& r, int cta) {
  clear_rows_from(r, cta * kThreads + int(threadIdx.x) / 32 * 32);
}

}  // namespace fp8cutlass::packing
