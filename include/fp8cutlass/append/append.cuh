// Appends tokens to a paged cache: CTAs that write rows of K, and of V where its descale is given; and where V's
// descale grows, CTAs that each write V of one page and head, as the page's descale must be known before its first
// byte.
//
// Of tokens for one slot the last is written, and no other writes a byte of it. So which bytes there are depends on no
// order in which CTAs run.
#pragma once

#include "fp8cutlass/append/place.cuh"
#include "fp8cutlass/append/row.cuh"

namespace fp8cutlass::appending {

// Of the rows of a CTA.
struct RowMemory {
  Place place[kMostTokens];
  int lost[kMostTokens];  // 1: a later token goes to the same slot
};

// Of a page of V.
struct PageMemory {
  int first;      // token of the batch that goes to the page
  unsigned most;  // the largest finite magnitude, a float's bits
  float old;      // the descale that the page had
  int unused;
  int owner[1];  // (page_size,) the token that goes there, -1: none
};
static_assert(sizeof(RowMemory) <= kAppendBytes && sizeof(PageMemory) <= kAppendBytes);

__device__ __forceinline__ uint8_t* row_of(const Store& s, const Place& at, int head) {
  return s.base + at.page * s.page + at.offset * s.token + head * s.head;
}
__device__ __forceinline__ float* descale_of(const PageDescale& d, int page, int offset, int head) {
  return reinterpret_cast<float*>(d.base + page * d.page + offset * d.token + head * d.head);
}

__device__ __forceinline__ void append_rows(const AppendParams& p, RowMemory& memory) {
  const int thread = threadIdx.x, lanes = 1 << p.lane_bits, rows_of_cta = kAppendThreads >> p.lane_bits;
  const bool v_grows = p.v_descale.base == nullptr;
  const int of_token = v_grows ? p.heads : 2 * p.heads, rows = p.count * of_token;
  const int begin = int(blockIdx.x) * rows_of_cta, end = min(begin + rows_of_cta, rows);
  const int row = begin + (thread >> p.lane_bits), column = kColumns * (thread & (lanes - 1));
  const int number = row / of_token, part = row - number * of_token, token = p.first + number;
  const bool is_v = part >= p.heads, there = row < end && column < p.head_dim;
  const int head = is_v ? part - p.heads : part;
  const Rows& from = is_v ? p.v : p.k;
  const uint8_t* const source = from.base + token * from.token + head * from.head;
  uint4 raw[4] = {};
  if (there) load(raw, source + column * bytes_of(p.type), p.type);  // while the places are found

  const int first = p.first + begin / of_token, tokens = (end - 1) / of_token - begin / of_token + 1;
  if (p.slots.base != nullptr) {
    for (int i = thread; i < tokens; i += kAppendThreads) {
      memory.place[i] = place_in_slots(p, first + i), memory.lost[i] = 0;
    }
  } else {
    for (int i = thread / 32; i < tokens; i += kAppendThreads / 32) {
      const Place at = place_in_table(p, first + i);
      if (thread % 32 == 0) memory.place[i] = at, memory.lost[i] = 0;
    }
  }
  __syncthreads();
  each_run(p, first + 1, p.slots.base != nullptr ? p.first + p.count : p.tokens, [&](const Run& run) {
#pragma unroll 1
    for (int i = 0; i < tokens; ++i) {
      const Place& at = memory.place[i];
      const int within = at.offset - run.offset;
      if (at.page == run.page && within >= 0 && within < run.count && run.token + within > first + i)
        memory.lost[i] = 1;
    }
  });
  __syncthreads();

  Place at{-1, 0, 0, 0};
  if (row < end && !memory.lost[token - first]) at = memory.place[token - first];
  const bool written = there && at.page >= 0;
  uint4 bytes = raw[0];
  if (p.type != kE4m3) {
    float y[16];
    to_floats(y, raw, p.type);
    if (!is_v && written) {
      if (column < 2 * p.half) turn(y, p, source, column, at.position);
      if (p.mean != nullptr) subtract(y, p.mean + head * p.mean_head + column);
    }
    if (p.rotated > 0) {
      float z[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) z[j] = y[j];
      rotate(z, column, p.rotated, p.rotation_scale);
#pragma unroll
      for (int j = 0; j < 16; ++j) y[j] = is_v ? y[j] : z[j];
    }
    if (!is_v && (p.rotated > 0 || p.mean != nullptr)) round_to(y, kBf16);
    float group = largest(y);
    for (int step = 1; step < lanes; step *= 2) group = fmaxf(group, __shfl_xor_sync(~0u, group, step));
    const packing::Scale found = packing::scale_of(group, kLimit, kLimitReciprocal);
    const GivenDescale& given = is_v ? p.v_descale : p.k_descale;
    const bool finds = !is_v && p.k_token.base != nullptr;
    float descale = found.descale, inverse = found.inverse;
    if (!finds && written) {
      descale = given.base[at.row * given.row + head * given.head];
      inverse = inverse_of(descale);
    }
    bytes = quantised(y, inverse);
    if (written && column == 0) {
      if (finds) *descale_of(p.k_token, at.page, at.offset, head) = descale;
      if (is_v && p.v_page.base != nullptr) *descale_of(p.v_page, at.page, 0, head) = descale;
    }
  }
  if (written) *reinterpret_cast<uint4*>(row_of(is_v ? p.v_store : p.k_store, at, head) + column) = bytes;
}

// The least power of two, 2^-126 or more, that takes a magnitude into e4m3; 0 for 0. 448 is 1.75 * 2^8.
__device__ __forceinline__ float power_of_two(unsigned magnitude) {
  if (magnitude == 0) return 0.f;
  const int octaves = int(magnitude >> 23) - 126 - 9 + ((magnitude & 0x7fffff) > 0x600000 ? 1 : 0);
  return octaves < -126 ? 0x1p-126f : __uint_as_float(unsigned(octaves + 127) << 23);
}

// Sixteen e4m3 numbers, each times a power of two that is less than 1. NaN keeps its sign.
__device__ __forceinline__ uint4 shrunk(const uint4& x, float factor) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t made[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[4];
    uint32_t nan = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t byte = words[i] >> 8 * j & 0xff;
      if ((byte & 0x7f) == 0x7f) nan |= 0xffu << 8 * j;
      // Exponent and fraction as those of a float whose exponent counts from 127 instead of 7: 2^120 puts that right.
      y[j] = __fmul_rn(__fmul_rn(__uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20), 0x1p120f), factor);
    }
    made[i] = (e4m3x4(y[0], y[1], y[2], y[3]) & ~nan) | (words[i] & nan);
  }
  return uint4{made[0], made[1], made[2], made[3]};
}

// V of the page that a token goes to, by the CTA of the first token that does.
__device__ __forceinline__ void append_page(const AppendParams& p, int token, int head, PageMemory& memory) {
  const int thread = threadIdx.x, lanes = 1 << p.lane_bits;
  const Place at = place_of(p, token);
  if (at.page < 0) return;
  if (token > 0 && place_of(p, token - 1).page == at.page) return;
  float* const descale = descale_of(p.v_page, at.page, 0, head);
  if (thread == 0) memory.first = p.tokens, memory.most = 0, memory.old = *descale;
  for (int i = thread; i < p.page_size; i += kAppendThreads) memory.owner[i] = -1;
  __syncthreads();
  each_run(p, 0, p.tokens, [&](const Run& run) {
    if (run.page != at.page) return;
    atomicMin(&memory.first, run.token);
    for (int i = 0; i < run.count; ++i) atomicMax(&memory.owner[run.offset + i], run.token + i);
  });
  __syncthreads();
  if (memory.first != token) return;

  const int group = thread >> p.lane_bits, groups = kAppendThreads >> p.lane_bits;
  const int column = kColumns * (thread & (lanes - 1));
  const auto load_new = [&](float (&y)[16], int owner) {
    uint4 raw[4] = {};
    load(raw, p.v.base + owner * p.v.token + head * p.v.head + column * bytes_of(p.type), p.type);
    to_floats(y, raw, p.type);
  };
  float own = 0.f;
  for (int i = group; i < p.page_size && column < p.head_dim; i += groups) {
    if (memory.owner[i] < 0) continue;
    float y[16];
    load_new(y, memory.owner[i]);
    own = fmaxf(own, largest(y));
  }
  atomicMax(&memory.most, __float_as_uint(own));
  __syncthreads();

  // A page that gets its first slot begins anew.
  const float old = memory.owner[0] >= 0 ? 0.f : memory.old;
  const float needed = old == old ? fmaxf(fmaxf(old, power_of_two(memory.most)), 0x1p-126f) : old;
  const float factor = old > 0.f ? __fdiv_rn(old, needed) : 1.f, inverse = inverse_of(needed);
  for (int i = group; i < p.page_size && column < p.head_dim; i += groups) {
    const int owner = memory.owner[i];
    uint4* const to = reinterpret_cast<uint4*>(row_of(p.v_store, Place{at.page, i, 0, 0}, head) + column);
    if (owner >= 0) {
      float y[16];
      load_new(y, owner);
      *to = quantised(y, inverse);
    } else if (factor != 1.f) {
      *to = shrunk(*to, factor);
    }
  }
  if (thread == 0) *descale = needed;
}

__device__ __forceinline__ void append_tokens(const AppendParams& p, uint8_t* memory) {
  wait_for_operands();
  dependents_may_begin();  // they wait for the tokens
  if (p.used != nullptr && blockIdx.x == 0) {
    for (int s = threadIdx.x; s < p.sequences; s += kAppendThreads)
      p.used[s] = int(unsigned(p.lengths[s]) + unsigned(p.cu[s + 1]) - unsigned(p.cu[s]));
  }
  const int block = blockIdx.x;
  if (block < p.row_ctas) {
    append_rows(p, *reinterpret_cast<RowMemory*>(memory));
  } else {
    const int token = (block - p.row_ctas) / p.heads;
    append_page(p, token, block - p.row_ctas - token * p.heads, *reinterpret_cast<PageMemory*>(memory));
  }
}

}  // namespace fp8cutlass::appending
