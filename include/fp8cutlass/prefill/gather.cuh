// Copies the keys of members (route.cuh) from pages to where the kernels of ragged batches read them: rows of K, V
// packed, both in blocks that share a descale. A CTA takes a block of one head of K or of V at a time. Bytes stay as
// they are where the block's keys share a descale. Else each key's are multiplied by its descale over the largest one,
// and rounded.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"
#include "fp8cutlass/decode/units.h"
#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/pack_fp8.cuh"
#include "fp8cutlass/prefill/params.h"

namespace fp8cutlass::prefill {

// A block of a member.
struct Source {
  int member, sequence, head;
  int begin, keys;  // the member's key that the block begins with, and how many keys the member has
};

// Four e4m3 bytes, rounded to nearest even. NaN stays NaN.
__device__ __forceinline__ uint32_t times(uint32_t bytes, float factor) {
  uint32_t low, high;
  decode::to_halves(low, high, bytes);
  return e4m3x4(__fmul_rn(half_low(low), factor), __fmul_rn(half_high(low), factor), __fmul_rn(half_low(high), factor),
                __fmul_rn(half_high(high), factor));
}

// Block number `block` of all members; false where it has no key that is seen. All lanes of a warp come here.
__device__ __forceinline__ bool find_source(const Members& m, int count, int block, Source& source) {
  const int i = last_begun(count, block, [&](int j) { return block_at(m.cu_k[j], j, kBlock); });
  const int key = m.cu_k[i];
  source.member = i, source.sequence = m.sequence[i];
  source.begin = (block - block_at(key, i, kBlock)) * kBlock, source.keys = m.cu_k[i + 1] - key;
  return source.begin >= 0 && source.begin < source.keys && source.begin + kBlock > m.first[i];
}

// Limits of a descale that a head has for itself, as the kernels of decode have them.
constexpr float kLeastDescale = 0x1p-126f, kMostDescale = 0x1p126f;

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffff) < 0x7f800000; }

// Bits where one of four e4m3 bytes is NaN.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t bytes) {
  return ((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

// The largest of all threads' numbers, which are not negative; every thread of the CTA comes here. `of_warp`: a word
// for each warp in shared memory, which nobody reads any more.
__device__ __forceinline__ float largest_of_cta(float x, uint32_t* of_warp) {
  uint32_t bits = __float_as_uint(x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
  __syncthreads();
  delay_point(31);
#pragma unroll
  for (int w = 0; w < packing::kThreads / 32; ++w) bits = max(bits, of_warp[w]);
  __syncthreads();  // all have read: other numbers may come there
  return __uint_as_float(bits);
}

// A CTA's share of all blocks. kLanes share a row of K or V in chunks of 16 bytes, kChunks each; a lane has a share of
// kPasses rows. `stage` is Stage, in shared memory.
template <class Stage, int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void gather_blocks(const GatherParams& p, uint8_t* stage) {
  constexpr int kStep = packing::kThreads / kLanes;  // rows
  const Members& m = p.members;
  const int count = *m.count;
  if (count == 0) return;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  // The last member begins behind as many blocks as its keys before have, and one for each member before.
  const int64_t blocks = m.cu_k[count] / kBlock + count, items = blocks * p.kv_heads * 2;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const bool is_v = item % 2 != 0;
    const int block = int(item / 2 / p.kv_heads);
    Source source;
    if (!find_source(m, count, block, source)) continue;
    source.head = int(item / 2 % p.kv_heads);
    const decode::Cache& cache = is_v ? p.v : p.k;
    const decode::TokenDescale& token_descale = is_v ? p.v_token : p.k_token;
    const decode::HeadDescale& head_descale = is_v ? p.v_descale : p.k_descale;
    const uint8_t* const head = cache.base + decode::steps(source.head, cache.head);
    // Without a table page s is all of sequence s.
    const int* const table =
        p.page_table == nullptr ? nullptr : p.page_table + decode::steps(source.sequence, p.table_row);
    float descale = head_descale.value;
    if (head_descale.base != nullptr)
      descale = head_descale.base[source.sequence * head_descale.sequence + source.head * head_descale.head];
    descale = fminf(fmaxf(descale, kLeastDescale), kMostDescale);
    uint4 x[kPasses][kChunks];
    float of_row[kPasses], largest = 0.f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = source.begin + first + pass * kStep;
      of_row[pass] = 0.f;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) x[pass][i] = uint4{0, 0, 0, 0};
      if (key >= source.keys) continue;
      const int entry = decode::quotient(key, p.by_page_size), token = key - entry * p.by_page_size.by;
      const int listed = table == nullptr ? source.sequence : table[min(entry, p.entries - 1)];
      const int page = decode::clamped(listed, 0, p.pages - 1);
      const uint8_t* const row = head + decode::steps(page, cache.page) + decode::steps(token, cache.token);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) x[pass][i] = *reinterpret_cast<const uint4*>(row + 16 * (lane + kLanes * i));
      if (token_descale.base == nullptr) continue;
      of_row[pass] = *reinterpret_cast<const float*>(token_descale.base + decode::steps(page, token_descale.page) +
                                                     decode::steps(token, token_descale.token) +
                                                     decode::steps(source.head, token_descale.head));
      if (is_finite(of_row[pass])) largest = max(largest, fabsf(of_row[pass]));
    }
    uint32_t nan = 0;
    if (token_descale.base != nullptr) {
      descale = largest_of_cta(largest, reinterpret_cast<uint32_t*>(stage));
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        // A descale that is not finite makes its key NaN.
        const float d = of_row[pass], factor = descale > 0.f ? __fdiv_rn(d, descale) : __fmul_rn(d, 0.f);
        if (factor == 1.f) continue;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          uint4& c = x[pass][i];
          c = uint4{times(c.x, factor), times(c.y, factor), times(c.z, factor), times(c.w, factor)};
        }
      }
    }
    if (threadIdx.x == 0) (is_v ? p.v_scales : p.k_scales)[source.head * (p.columns / kBlock) + block] = descale;
    if (is_v) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const uint4& c = x[pass][i];
          nan |= nan_bytes(c.x) | nan_bytes(c.y) | nan_bytes(c.z) | nan_bytes(c.w);
        }
    }
    // A NaN of V would reach all rows of its tile. The kernels of decode know which rows see it.
    if (nan != 0) p.lengths[source.sequence] = source.keys, m.used_q[source.member] = 0;
    const int64_t to = int64_t{source.head} * kHeadDim * p.columns;
    if (is_v) {
      packing::stage_bytes<Stage, kLanes>(stage, x);
      __syncthreads();
      packing::store_packed<Stage, kBlock, kHeadDim>(p.v_out + to + int64_t{block} * kBlock, p.columns, kBlock, stage);
      __syncthreads();  // before the next block's rows
    } else {
      packing::store_bytes<kHeadDim, kLanes>(p.k_out + to + int64_t{block} * kBlock * kHeadDim, x, 0, kBlock, 0);
    }
  }
}

}  // namespace fp8cutlass::prefill
