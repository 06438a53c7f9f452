// The lengths of a ragged batch, which only the device knows. Nothing that they say is trusted: whatever they are, a
// sequence lies inside the tensors.
#pragma once

#include <cuda_runtime.h>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

__device__ __forceinline__ int between(int x, int least, int most) { return max(least, min(x, most)); }

struct Span {
  int first, count;  // tokens
};

// What `begin` and `end` say of a sequence whose batch has `total` tokens.
__device__ __forceinline__ Span span_of(int begin, int end, int total) {
  Span span;
  span.first = between(begin, 0, total);
  span.count = between(end, span.first, total) - span.first;
  return span;
}

// Sequence `s` of a batch whose tokens begin at `ends` and are `total` in all; `used` of them count, or null: all.
__device__ __forceinline__ Span span_at(const int* ends, const int* used, int total, int s) {
  Span span = span_of(ends[s], ends[s + 1], total);
  if (used != nullptr) span.count = between(used[s], 0, span.count);
  return span;
}

__device__ __forceinline__ Span rows_at(const RaggedBatch& b, int total_q, int s) {
  return span_at(b.cu_q, b.used_q, total_q, s);
}

__device__ __forceinline__ Span keys_at(const RaggedBatch& b, int s) {
  return span_at(b.cu_k, b.used_k, b.key_tokens, s);
}

// The block of packed K and V where a sequence begins whose first key is `key`.
__device__ __forceinline__ int block_at(int key, int s, int key_block) { return key / key_block + s; }

// The last of `sequences` that begins at `x` or before, 0 where none does: `begin` rises with the sequence. A warp asks
// together, and 32 sequences at a time: each step waits for memory once. Where lengths lie and `begin` does not rise,
// it is some sequence.
template <class Begin>
__device__ __forceinline__ int last_begun(int sequences, int x, const Begin& begin) {
  const int lane = threadIdx.x % 32;
  int first = 0;
#pragma unroll 1
  for (int count = sequences; count > 1;) {
    const int step = (count + 31) / 32, ahead = lane * step;
    const unsigned begun = __ballot_sync(~0u, ahead < count && begin(first + ahead) <= x);
    const int last = (begun == 0 ? 0 : 31 - __clz(int(begun))) * step;
    first += last, count = min(step, count - last);
  }
  return first;
}

}  // namespace fp8cutlass
