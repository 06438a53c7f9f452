// Units of 64 rows: their products and softmax by warpgroups, each 64 keys at a time, which other warps put into shared
// memory as f16 (convert.cuh). Rows of the unit are the rows of both products, of which a warp has 16.
//
// Lane 4g + t holds rows g and g + 8 of its warp's 16: of each 8 x 8 block of S the keys 2t and 2t + 1, of each one of
// O the columns 2t and 2t + 1.
#pragma once

#include "fp8cutlass/decode/finish.cuh"
#include "fp8cutlass/decode/tiles.cuh"

namespace fp8cutlass::decode {

template <int kHeadDim>
struct WideState {
  static constexpr int kBlocks = kHeadDim / 8;
  float o[kBlocks][4];  // columns 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8
  float most[2];        // largest score so far, in powers of two
  float sum[2];         // of this lane's keys
  float v_descale;      // that O is to be multiplied by: the largest so far, where tokens have their own

  __device__ __forceinline__ void clear(bool own_v_descales) {
    v_descale = own_v_descales ? 0.f : 1.f;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = 0.f;
    most[0] = most[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  __device__ __forceinline__ void shrink(float first, float second) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) o[j][0] *= first, o[j][1] *= first, o[j][2] *= second, o[j][3] *= second;
  }
};

// The row of the unit that is this lane's first.
__device__ __forceinline__ int first_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// What row `row` of a unit sees. A row past the last query sees what that one does.
__device__ __forceinline__ Keys seen_by_row(const DecodeParams& params, const Share& share, int row) {
  const int query = quotient(share.row + row, params.batch.by_group);
  return seen_by(params.batch, share.of, min(query, share.of.queries - 1));
}

// Whether any number of V of a tile is NaN.
template <int kHeadDim>
__device__ __forceinline__ bool has_nan(const KeyTile<kHeadDim>& tile, Handoff& handoff) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  bool found = false;
  for (int i = threadIdx.x % 128; i < int(sizeof(tile.v)) / 4; i += 128) {
    const uint32_t two = reinterpret_cast<const uint32_t*>(tile.v)[i];
    found |= (two & 0x7fff) > 0x7c00 || (two >> 16 & 0x7fff) > 0x7c00;
  }
  found = __any_sync(~0u, found);
  if (lane == 0) handoff.has_nan[warp] = found;
  meet_warpgroup();
  const int any = handoff.has_nan[0] | handoff.has_nan[1] | handoff.has_nan[2] | handoff.has_nan[3];
  meet_warpgroup();  // before the next one's are written
  return any != 0;
}

// Takes what is NaN out of V of a tile, and puts it into O where a row sees its key: in the product, a row whose P is 0
// there would get it, too.
template <int kHeadDim>
__device__ __forceinline__ void separate_nan(const DecodeParams& params, const Share& share, int key,
                                             KeyTile<kHeadDim>& tile, WideState<kHeadDim>& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
  const Keys seen[2] = {seen_by_row(params, share, first_row()), seen_by_row(params, share, first_row() + 8)};
  const auto is_nan = [](uint32_t half) { return (half & 0x7fff) > 0x7c00; };
#pragma unroll 1
  for (int i = 0; i < kGroupKeys; ++i)
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(tile.v[j / 8] + panel_offset(i, j % 8) + 4 * t);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const Keys& of = seen[x / 2];
        if (is_nan(two >> x % 2 * 16) && key + i >= of.first && key + i < of.end) state.o[j][x] = NAN;
      }
    }
  meet_warpgroup();  // all have read it
#pragma unroll 1
  for (int i = lane; i < kHeadDim / 64 * 16 * kPanelPitch / 2; i += 32) {
    const int panel = i / (16 * kPanelPitch / 2), at = i % (16 * kPanelPitch / 2);
    uint16_t& half = reinterpret_cast<uint16_t*>(tile.v[panel] + 16 * warp * kPanelPitch)[at];
    if (is_nan(half)) half = 0;
  }
  fence_products();
  meet_warpgroup();
}

// Adds the 64 keys from `key` on, a warpgroup's tile number `number`, to the state of the unit.
template <int kHeadDim>
__device__ __forceinline__ void add_tile(const DecodeParams& params, const Share& share, const Sight& sight, int key,
                                         int number, KeyTile<kHeadDim> (&tiles)[2], Handoff& handoff,
                                         const uint8_t* queries, const float* slope, WideState<kHeadDim>& state) {
  constexpr int kBlocks = kGroupKeys / 8, kSteps = kGroupKeys / 16;
  const int lane = threadIdx.x % 32, t = lane % 4, row = first_row();
  const bool own_k = params.k_token.base != nullptr, own_v = params.v_token.base != nullptr;
  const bool edge = key < sight.first_all || key + kGroupKeys > sight.end_all;
  KeyTile<kHeadDim>& tile = tiles[number % 2];
  delay_point(20);
  float s[kBlocks][4];
  wait(handoff.there[number % 2], number / 2 % 2);
  begin_products();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i)
    multiply_by_keys(s, queries + i / 4 * kPanelBytes, tile.k[i / 4], i % 4, i == 0);
  end_products();
  await_products(s);

  // A score in powers of two is `factor` times what stands in s. Values 0 and 1 of a block are of the first row, 2 and
  // 3 of the second.
  float factor[2] = {slope[row], slope[row + 8]};
  if (own_k || params.softcap > 0.f || !(params.scale > 0.f)) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= factor[i / 2];
    factor[0] = factor[1] = 1.f;
  } else {  // 0 times what is hidden, minus infinity, would be NaN
    factor[0] = fmaxf(factor[0], 0x1p-126f), factor[1] = fmaxf(factor[1], 0x1p-126f);
  }
  if (own_k) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 descale = *reinterpret_cast<const float2*>(tile.k_descale + 8 * n + 2 * t);
      s[n][0] *= descale.x, s[n][1] *= descale.y, s[n][2] *= descale.x, s[n][3] *= descale.y;
    }
  }
  if (params.softcap > 0.f) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = tanh_approx(s[n][i]) * (params.softcap * 1.4426950408889634f);
  }
  if (edge) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Keys seen = seen_by_row(params, share, row + 8 * c);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = key + 8 * n + 2 * t + i;
          if (at < seen.first || at >= seen.end) s[n][2 * c + i] = -INFINITY;
        }
    }
  }

  float grown[2], shrink[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) most = fmaxf(most, fmaxf(s[n][2 * c], s[n][2 * c + 1]));
    most = fmaxf(state.most[c], most * factor[c]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    grown[c] = most;
    // A row that has seen no key yet has no O either.
    shrink[c] = most == -INFINITY ? 1.f : exp2_approx(state.most[c] - most);
  }
  if (__any_sync(~0u, grown[0] > state.most[0] || grown[1] > state.most[1])) {
    state.shrink(shrink[0], shrink[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) state.sum[c] *= shrink[c], state.most[c] = grown[c];
  }
  // V's descales go into P, relative to the largest so far, so that f16 has room for it.
  float per_v_descale = 1.f;
  if (own_v) {
    float largest = fmaxf(tile.v_descale[lane], tile.v_descale[lane + 32]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (largest > state.v_descale) {
      state.shrink(state.v_descale / largest, state.v_descale / largest);
      state.v_descale = largest;
    }
    per_v_descale = state.v_descale > 0.f ? 1.f / state.v_descale : 0.f;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float reference = state.most[c] == -INFINITY ? 0.f : state.most[c];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 2 * c; i < 2 * c + 2; ++i) {
        s[n][i] = exp2_approx(fmaf(s[n][i], factor[c], -reference) + kBias);  // it would be lost beside a large score
        state.sum[c] += s[n][i];
      }
  }
  if (own_v) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 descale = *reinterpret_cast<const float2*>(tile.v_descale + 8 * n + 2 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= (i % 2 == 0 ? descale.x : descale.y) * per_v_descale;
    }
  }
  uint32_t p[kSteps][4];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    p[n / 2][n % 2 * 2] = fp16x2(s[n][0], s[n][1]), p[n / 2][n % 2 * 2 + 1] = fp16x2(s[n][2], s[n][3]);

  // Only where rows see different keys can one that is hidden from a row meet another's.
  if (edge && has_nan(tile, handoff)) separate_nan<kHeadDim>(params, share, key, tile, state);
  begin_products(state.o);
#pragma unroll
  for (int m = 0; m < kSteps; ++m)
#pragma unroll
    for (int j = 0; j < kHeadDim / 64; ++j) multiply_by_values(state.o, 8 * j, p[m], tile.v[j], m);
  end_products();
  await_products(state.o);
  arrive(handoff.free[number % 2]);
}

// Adds up the warpgroups: afterwards exchange.o, row_most and row_sum have the share's result. A warp has no part in
// the rows of others.
template <int kHeadDim, int kRows, int kWarps, class Meet>
__device__ __forceinline__ void join_warps(Exchange<kHeadDim, kRows, kWarps>& exchange,
                                           const WideState<kHeadDim>& state, const Meet& meet) {
  constexpr int kPitch = kResultPitch<kHeadDim>, kGroups = kWarps / 4, kBlocks = kHeadDim / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, own = first_row();
  for (int row = lane; row < kRows; row += 32)
    if (row / 16 != warp % 4) exchange.most[warp][row] = -INFINITY, exchange.sum[warp][row] = 0.f;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = state.sum[c];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (t == 0) exchange.most[warp][own + 8 * c] = state.most[c], exchange.sum[warp][own + 8 * c] = sum;
  }
  meet();
  delay_point(21);
  float factor[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float most = most_of(exchange, own + 8 * c);
    factor[c] = weight(state.most[c], most) * state.v_descale;
    if (warp < 4 && t == 0) set_sum(exchange, own + 8 * c, most);
  }
  // Columns are cut into as many sets as there are warpgroups. In each round a warpgroup adds to another set.
#pragma unroll 1
  for (int round = 0; round < kGroups; ++round) {
    const int set = (warp / 4 + round) % kGroups;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (set != j * kGroups / kBlocks) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float2* const to = reinterpret_cast<float2*>(exchange.o + (own + 8 * c) * kPitch + 8 * j + 2 * t);
        float2 x = round == 0 ? make_float2(0.f, 0.f) : *to;
        x.x += factor[c] * state.o[j][2 * c], x.y += factor[c] * state.o[j][2 * c + 1];
        *to = x;
      }
    }
    meet();
  }
}

}  // namespace fp8cutlass::decode
