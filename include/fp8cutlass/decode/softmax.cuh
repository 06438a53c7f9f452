// The products and the softmax of one warp: a slice of keys against all rows of the unit. Keys are the rows of both
// products, so that 8 queries fill a matrix instruction. e4m3 becomes f16 in registers, which is exact: V is read as it
// lies, not transposed in memory.
//
// Lane 4g + t holds, of each 8 x 8 block of S^T, key g and rows 2t and 2t + 1. Of O^T it holds columns 16j + 2g and
// 16j + 2g + 1 of the same rows, so that what a row's softmax needs is in its lanes.
#pragma once

#include "fp8cutlass/decode/fetch.cuh"

namespace fp8cutlass::decode {

// P is 2^15 times the exponential relative to the largest score: in f16, what is 2^-39 of the largest still counts.
constexpr float kBias = 15.f;

template <int kHeadDim, int kRows>
struct State {
  static constexpr int kBlocks = kRows / 8, kColumns = kHeadDim / 16;
  float o[kColumns][kBlocks][4];  // of O^T: columns 16j + 2g (row 2t, row 2t + 1), then 16j + 2g + 1
  float most[kBlocks][2];         // largest score so far, in powers of two
  float sum[kBlocks][2];          // of this lane's keys
  float v_descale;                // that O is to be multiplied by: the largest so far, where tokens have their own

  __device__ __forceinline__ void clear(bool own_v_descales) {
    v_descale = own_v_descales ? 0.f : 1.f;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[j][n][i] = 0.f;
      most[n][0] = most[n][1] = -INFINITY;
      sum[n][0] = sum[n][1] = 0.f;
    }
  }
};

// What the rows of a unit see: row r, its query, keys from `first` to before `end`, and what all of them see.
struct Sight {
  int first_all, end_all;  // keys that every row sees

  template <int kRows>
  __device__ __forceinline__ static Sight of(const Batch& b, const Share& share) {
    const int last = min(share.row + kRows, share.of.queries * b.by_group.by) - 1;
    return {seen_by(b, share.of, quotient(last, b.by_group)).first,
            seen_by(b, share.of, quotient(share.row, b.by_group)).end};
  }
};

// 16-byte chunks 2j and 2j + 1 of keys 16m to 16m + 15: the row whose address this lane has.
template <int kHeadDim>
__device__ __forceinline__ int matrix_row(int m, int j) {
  const int lane = threadIdx.x % 32;
  return Rows<kHeadDim>::offset(16 * m + lane % 16, 2 * j + lane / 16);
}

// To about 2^-22, which is what a score keeps beside the largest.
__device__ __forceinline__ float tanh_approx(float x) {
  return 1.f - 2.f * reciprocal_approx(1.f + exp2_approx(x * 2.8853900817779268f));
}

// Bytes of e4m3 that are NaN, as 0x80.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t x) { return ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

// a: V^T of 16 columns and keys 16m to 16m + 15, from two matrices of 8 keys.
__device__ __forceinline__ void value_fragment(uint32_t (&a)[4], uint32_t low_keys, uint32_t high_keys) {
  to_halves(a[0], a[1], __byte_perm(low_keys, 0, 0x3120));
  to_halves(a[2], a[3], __byte_perm(high_keys, 0, 0x3120));
}

// O^T += V^T P^T.
template <int kHeadDim, int kRows, int kSteps>
__device__ __forceinline__ void accumulate(State<kHeadDim, kRows>& state, const uint8_t* v,
                                           const uint32_t (&p)[kSteps][kRows / 8][2]) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 32; ++j)
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t r[4], a[4];
      load_transposed(r, v + matrix_row<kHeadDim>(m, j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        value_fragment(a, r[2 * h], r[2 * h + 1]);
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) multiply(state.o[2 * j + h][n], a, p[m][n][0], p[m][n][1]);
      }
    }
}

// Whether any byte of this warp's slice of V is NaN.
template <int kHeadDim, int kSteps>
__device__ __forceinline__ bool has_nan(const uint8_t* v) {
  uint32_t found = 0;
#pragma unroll
  for (int j = 0; j < kHeadDim / 32; ++j)
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t r[4];
      load_matrices(r, v + matrix_row<kHeadDim>(m, j));
      found |= nan_bytes(r[0]) | nan_bytes(r[1]) | nan_bytes(r[2]) | nan_bytes(r[3]);
    }
  return __any_sync(~0u, found != 0);
}

// Takes what is NaN out of a slice of V, and puts it into O where a row sees its key: in the product, a row whose P is
// 0 there would get it, too. Seldom needed, so it saves registers and not time.
template <int kHeadDim, int kRows, int kSlice>
__device__ __forceinline__ void separate_nan(const DecodeParams& params, const Share& share, int key, uint8_t* v,
                                             State<kHeadDim, kRows>& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int i = 0; i < kSlice; ++i) {
    bool sees[kRows / 8][2];
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = quotient(share.row + 8 * n + 2 * t + c, params.batch.by_group);
        const Keys seen = seen_by(params.batch, share.of, min(query, share.of.queries - 1));
        sees[n][c] = key + i >= seen.first && key + i < seen.end;
      }
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const uint32_t found = nan_bytes(*reinterpret_cast<const uint16_t*>(v + Rows<kHeadDim>::offset(i, j) + 2 * g));
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x)
          if ((found >> (x / 2 * 8) & 0x80) != 0 && sees[n][x % 2]) state.o[j][n][x] = NAN;
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < kSlice * Rows<kHeadDim>::kPitch / 4; i += 32) {
    uint32_t& word = reinterpret_cast<uint32_t*>(v)[i];
    word &= ~((nan_bytes(word) >> 7) * 0xffu);
  }
  __syncwarp();
}

// Adds the slice whose keys begin at `key` to the state of the unit.
template <int kHeadDim, int kRows, int kSlice>
__device__ __forceinline__ void add_slice(const DecodeParams& params, const Share& share, const Sight& sight, int key,
                                          Slot<kHeadDim, kSlice>& slot, const uint8_t* queries, const float* slope,
                                          State<kHeadDim, kRows>& state) {
  constexpr int kSteps = kSlice / 16, kBlocks = kRows / 8;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  delay_point(20);
  float s[kSteps][kBlocks][4] = {};
#pragma unroll
  for (int j = 0; j < kHeadDim / 32; ++j) {
    uint2 q[kBlocks][2];  // the columns of a lane, of chunks 2j and 2j + 1
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        q[n][h] =
            *reinterpret_cast<const uint2*>(queries + (8 * n + g) * kQueryPitch<kHeadDim> + 64 * j + 32 * h + 8 * t);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t r[4], a[4];
      load_matrices(r, slot.k + matrix_row<kHeadDim>(m, j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to_halves(a[0], a[2], r[2 * h]);
        to_halves(a[1], a[3], r[2 * h + 1]);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) multiply(s[m][n], a, q[n][h].x, q[n][h].y);
      }
    }
  }

  // Scores in powers of two. Value i of a block is of key g + 8 (i / 2) and row 2t + i % 2.
  const bool own_descales = params.k_token.base != nullptr,
             edge = key < sight.first_all || key + kSlice > sight.end_all;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 factor = *reinterpret_cast<const float2*>(slope + 8 * n + 2 * t);
#pragma unroll
    for (int m = 0; m < kSteps; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = s[m][n][i] * (i % 2 == 0 ? factor.x : factor.y);
        if (own_descales) x *= slot.k_descale[16 * m + g + i / 2 * 8];
        s[m][n][i] = x;
      }
  }
  if (params.softcap > 0.f) {  // one branch: the compiler would make one for each score
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int m = 0; m < kSteps; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = tanh_approx(s[m][n][i]) * (params.softcap * 1.4426950408889634f);
  }
  if (edge) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = quotient(share.row + 8 * n + 2 * t + c, params.batch.by_group);
        const Keys seen = seen_by(params.batch, share.of, min(query, share.of.queries - 1));
#pragma unroll
        for (int m = 0; m < kSteps; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = key + 16 * m + g + 8 * h;
            if (at < seen.first || at >= seen.end) s[m][n][2 * h + c] = -INFINITY;
          }
      }
  }

  uint32_t p[kSteps][kBlocks][2];
  float grown[kBlocks][2];
  bool grows = false;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float most = state.most[n][c];
#pragma unroll
      for (int m = 0; m < kSteps; ++m) most = fmaxf(most, fmaxf(s[m][n][c], s[m][n][2 + c]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      grown[n][c] = most;
      grows |= most > state.most[n][c];
    }
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // A row that has seen no key yet has no O either.
        const float shrink = grown[n][c] == -INFINITY ? 1.f : exp2_approx(state.most[n][c] - grown[n][c]);
        state.most[n][c] = grown[n][c];
        state.sum[n][c] *= shrink;
#pragma unroll
        for (int j = 0; j < kHeadDim / 16; ++j) state.o[j][n][c] *= shrink, state.o[j][n][2 + c] *= shrink;
      }
  }
  // V's descales go into P, relative to the largest so far, so that f16 has room for it.
  const bool own_v = params.v_token.base != nullptr;
  float per_v_descale = 1.f;
  if (own_v) {
    float largest = slot.v_descale[lane % kSlice];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (largest > state.v_descale) {
      const float shrink = state.v_descale / largest;
      state.v_descale = largest;
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) state.o[j][n][i] *= shrink;
    }
    per_v_descale = state.v_descale > 0.f ? 1.f / state.v_descale : 0.f;
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float reference[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) reference[c] = state.most[n][c] == -INFINITY ? 0.f : state.most[n][c];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] =
            exp2_approx((s[m][n][i] - reference[i % 2]) + kBias);  // the bias beside a large score would be lost
        state.sum[n][i % 2] += s[m][n][i];
        if (own_v) s[m][n][i] *= slot.v_descale[16 * m + g + i / 2 * 8] * per_v_descale;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) p[m][n][h] = transposed(fp16x2(s[m][n][2 * h], s[m][n][2 * h + 1]));
    }
  }

  // Only where rows see different keys can one that is hidden from a row meet another's.
  if (edge && has_nan<kHeadDim, kSteps>(slot.v))
    separate_nan<kHeadDim, kRows, kSlice>(params, share, key, slot.v, state);
  accumulate<kHeadDim, kRows, kSteps>(state, slot.v, p);
}

}  // namespace fp8cutlass::decode
