// The end of a share: the states of the warps become one, in a fixed order. From there on each warp has some rows for
// itself. Where the CTA has all of a unit, it writes them. Where CTAs share one, each leaves its part in memory, and
// the warp that is the last to arrive puts the parts together, in the order of the CTAs.
#pragma once

#include <type_traits>

#include "fp8cutlass/decode/query.cuh"
#include "fp8cutlass/decode/softmax.cuh"

namespace fp8cutlass::decode {

// What all warps of a CTA share, beside the slots.
template <int kHeadDim, int kRows, int kWarps>
struct Exchange {
  Queries<kHeadDim, kRows, kWarps> queries[2];  // of this share and the next
  alignas(16) float o[kRows * kResultPitch<kHeadDim>];
  float most[kWarps][kRows], sum[kWarps][kRows];
  float row_most[kRows], row_sum[kRows];
  float v_descale[kWarps];
};

// A part: O of all rows, their largest scores, their sums.
template <int kHeadDim, int kRows>
constexpr int kPartFloats = kRows * (kHeadDim + 2);

__device__ __forceinline__ float weight(float most, float of_all) {
  return most == -INFINITY ? 0.f : exp2_approx(most - of_all);
}

// Tells the other warps the largest scores and the sums of this one.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void tell_sums(Exchange<kHeadDim, kRows, kWarps>& exchange,
                                          const State<kHeadDim, kRows>& state) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = state.sum[n][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (g == 0) {
        exchange.most[warp][8 * n + 2 * t + c] = state.most[n][c];
        exchange.sum[warp][8 * n + 2 * t + c] = sum;
      }
    }
}

// The largest score of a row in any warp.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ float most_of(const Exchange<kHeadDim, kRows, kWarps>& exchange, int row) {
  float most = exchange.most[0][row];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) most = fmaxf(most, exchange.most[w][row]);
  return most;
}

// What it and the row's sum are in all warps together.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void set_sum(Exchange<kHeadDim, kRows, kWarps>& exchange, int row, float most) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += exchange.sum[w][row] * weight(exchange.most[w][row], most);
  exchange.row_most[row] = most, exchange.row_sum[row] = sum;
}

// Whether `join_last` may take the place of `join_warps`: with more of O its code spills.
template <int kHeadDim, int kRows>
constexpr bool kHasTwoJoins = kRows * kHeadDim <= 2048;

// sum + factor * o. Where two functions have to give the same bits, it is fused by name: the compiler may fuse either
// product of a sum of two. Elsewhere it has the choice, which costs fewer registers.
template <bool kByName>
__device__ __forceinline__ float add_product(float sum, float factor, float o) {
  return kByName ? fmaf(factor, o, sum) : sum + factor * o;
}

// Adds up the warps: afterwards exchange.o, row_most and row_sum have the share's result. O is relative to row_most.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void join_warps(Exchange<kHeadDim, kRows, kWarps>& exchange,
                                           const State<kHeadDim, kRows>& state) {
  constexpr int kPitch = kResultPitch<kHeadDim>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  tell_sums(exchange, state);
  __syncthreads();
  delay_point(21);
  float factor[kRows / 8][2];
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + 2 * t + c;
      const float most = most_of(exchange, row);
      factor[n][c] = weight(state.most[n][c], most) * state.v_descale;
      if (warp == 0 && g == 0) set_sum(exchange, row, most);
    }
  // Columns are cut into as many sets as there are warps. In each round a warp adds to another set.
  constexpr int kColumns = kHeadDim / 16;
#pragma unroll 1
  for (int round = 0; round < kWarps; ++round) {
    const auto add = [&](auto set) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (set != j * kWarps / kColumns) continue;
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float2* const to = reinterpret_cast<float2*>(exchange.o + (8 * n + 2 * t + c) * kPitch + 16 * j + 2 * g);
            float2 x = round == 0 ? make_float2(0.f, 0.f) : *to;
            x.x = add_product<kHasTwoJoins<kHeadDim, kRows>>(x.x, factor[n][c], state.o[j][n][c]);
            x.y = add_product<kHasTwoJoins<kHeadDim, kRows>>(x.y, factor[n][c], state.o[j][n][2 + c]);
            *to = x;
          }
      }
    };
    static_assert(kWarps <= 8);
    switch ((warp + round) % kWarps) {
      case 0:
        add(std::integral_constant<int, 0>());
        break;
      case 1:
        add(std::integral_constant<int, 1>());
        break;
      case 2:
        add(std::integral_constant<int, 2>());
        break;
      case 3:
        add(std::integral_constant<int, 3>());
        break;
      case 4:
        add(std::integral_constant<int, 4>());
        break;
      case 5:
        add(std::integral_constant<int, 5>());
        break;
      case 6:
        add(std::integral_constant<int, 6>());
        break;
      default:
        add(std::integral_constant<int, 7>());
    }
    __syncthreads();
  }
}

__device__ __forceinline__ float sink_of(const DecodeParams& p, int head, int token) {
  const int64_t at = head * p.sink_head + token * p.sink_token;
  if (p.sink_type == kSinkFp32) return static_cast<const float*>(p.sinks)[at];
  return from_half_bits(static_cast<const uint16_t*>(p.sinks)[at], p.sink_type == kSinkBf16);
}

// Whether a warp's slots have room for its O as well.
template <int kHeadDim, int kRows, typename Slots>
constexpr bool kHoldsResult =
    kHasTwoJoins<kHeadDim, kRows> && sizeof(Slots) >= sizeof(float) * kRows * kResultPitch<kHeadDim>;

// The same after the last share of a CTA. Nothing is copied any more, so that O of every warp goes where its keys were,
// and each warp adds up what all have of its rows: one barrier instead of one a warp and one more. The order of
// additions is that of `join_warps`, and so are the bits.
template <int kHeadDim, int kRows, int kWarps, typename Slots>
__device__ __forceinline__ void join_last(Exchange<kHeadDim, kRows, kWarps>& exchange, Slots (&slots)[kWarps],
                                          const State<kHeadDim, kRows>& state) {
  constexpr int kPitch = kResultPitch<kHeadDim>, kColumns = kHeadDim / 16, kOwn = kOwnRows<kRows, kWarps>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto result_of = [&](int w) { return reinterpret_cast<float*>(&slots[w]); };
  tell_sums(exchange, state);
  __syncwarp();  // all lanes are done with the keys
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        *reinterpret_cast<float2*>(result_of(warp) + (8 * n + 2 * t + c) * kPitch + 16 * j + 2 * g) =
            make_float2(state.o[j][n][c], state.o[j][n][2 + c]);
  if (lane == 0) exchange.v_descale[warp] = state.v_descale;
  __syncthreads();
  delay_point(21);
  for (int i = lane; i < kOwn * kHeadDim / 4; i += 32) {
    const int row = warp * kOwn + i / (kHeadDim / 4), column = 4 * (i % (kHeadDim / 4));
    const int set = column / 16 * kWarps / kColumns;
    const float most = most_of(exchange, row);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int round = 0; round < kWarps; ++round) {
      const int w = (set + kWarps - round) % kWarps;
      const float factor = weight(exchange.most[w][row], most) * exchange.v_descale[w];
      const float4 o = *reinterpret_cast<const float4*>(result_of(w) + row * kPitch + column);
      x.x = add_product<true>(x.x, factor, o.x), x.y = add_product<true>(x.y, factor, o.y);
      x.z = add_product<true>(x.z, factor, o.z), x.w = add_product<true>(x.w, factor, o.w);
    }
    *reinterpret_cast<float4*>(exchange.o + row * kPitch + column) = x;
    if (column == 0) set_sum(exchange, row, most);
  }
  __syncwarp();
}

// Writes a warp's rows of a unit: `o` (row, column) is relative to exchange.row_most, as is exchange.row_sum.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void store_rows(const DecodeParams& p, const Share& share,
                                           const Exchange<kHeadDim, kRows, kWarps>& exchange, float v_descale) {
  constexpr int kChunks = kHeadDim / 4, kOwn = kOwnRows<kRows, kWarps>;
  const int group = p.batch.by_group.by, lane = threadIdx.x % 32, own = int(threadIdx.x) / 32 * kOwn;
#pragma unroll 1
  for (int i = lane; i < kOwn * kChunks; i += 32) {
    const int row = own + i / kChunks, chunk = i % kChunks, at = share.row + row;
    const int query = quotient(at, p.batch.by_group), head = share.kv_head * group + at - query * group;
    if (query >= share.of.queries) break;
    const int token = share.of.query + query;
    float most = exchange.row_most[row], sum = exchange.row_sum[row], shrink = 1.f;
    const bool none = most == -INFINITY && sum == 0.f;  // a NaN is no largest score, but in the sum
    if (p.sinks != nullptr) {
      const float sink = sink_of(p, head, token) * 1.4426950408889634f, larger = fmaxf(most, sink);
      shrink = weight(most, larger);
      sum = sum * shrink + weight(sink, larger) * exp2_approx(kBias);
      most = larger;
    }
    const float factor = none ? 0.f : shrink * v_descale / sum;
    const float* const o = exchange.o + row * kResultPitch<kHeadDim> + 4 * chunk;
    uint32_t words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const float low = none ? 0.f : o[2 * w] * factor, high = none ? 0.f : o[2 * w + 1] * factor;
      words[w] = p.q_bf16 ? bf16x2(low, high) : fp16x2(low, high);
    }
    uint8_t* const to = static_cast<uint8_t*>(p.o) + 2 * (steps(token, p.o_row) + steps(head, p.o_head) + 4 * chunk);
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    if (p.lse != nullptr && chunk == 0)
      p.lse[int64_t(head) * p.batch.total_q + token] =
          none ? -INFINITY : (most - kBias) * 0.6931471805599453f + logf(sum);
  }
}

// Rows of queries that belong to no sequence: before the first one's and past the last one's.
template <int kHeadDim, int kThreads>
__device__ __forceinline__ void clear_others(const DecodeParams& p, int first, int end) {
  const int rows = (first + p.batch.total_q - end) * p.batch.heads;
  for (int row = blockIdx.x; row < rows; row += p.ctas) {
    const int at = row / p.batch.heads, head = row % p.batch.heads;
    const int token = at < first ? at : end + at - first;
    uint8_t* const to = static_cast<uint8_t*>(p.o) + 2 * (steps(token, p.o_row) + steps(head, p.o_head));
    for (int i = threadIdx.x; i < kHeadDim / 8; i += kThreads) reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    if (p.lse != nullptr && threadIdx.x == 0) p.lse[int64_t(head) * p.batch.total_q + token] = -INFINITY;
  }
}

// Leaves this warp's rows of the CTA's part of a unit in memory. Returns whether it is the last of `count` CTAs to do
// so. A row's largest score and sum lie side by side.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ bool leave_part(const DecodeParams& p, int slot, int first, int count,
                                           const Exchange<kHeadDim, kRows, kWarps>& exchange) {
  constexpr int kOwn = kOwnRows<kRows, kWarps>, kPieces = kOwn * kHeadDim / 4;  // of four columns, of a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const part = p.parts + int64_t(slot) * kPartFloats<kHeadDim, kRows>;
  delay_point(23);
#pragma unroll
  for (int i = lane; i < kPieces; i += 32) {
    const int row = warp * kOwn + i / (kHeadDim / 4), column = 4 * (i % (kHeadDim / 4));
    *reinterpret_cast<float4*>(part + row * kHeadDim + column) =
        *reinterpret_cast<const float4*>(exchange.o + row * kResultPitch<kHeadDim> + column);
  }
  if (lane < kOwn) {
    const int row = warp * kOwn + lane;
    *reinterpret_cast<float2*>(part + kRows * kHeadDim + 2 * row) =
        make_float2(exchange.row_most[row], exchange.row_sum[row]);
  }
  __syncwarp();
  delay_point(22);
  unsigned* const arrived = &p.arrived[first * kArrivals + warp];
  const bool last = __shfl_sync(~0u, lane == 0 ? arrive(arrived) : 0, 0) == unsigned(count - 1);
  if (last && lane == 0) *arrived = 0;
  __syncwarp();
  return last;
}

// Where CTA `c` leaves its part of a unit that `first` begins.
__device__ __forceinline__ int slot_of(int c, int first) { return 2 * c + (c == first ? 1 : 0); }

// Puts a warp's rows of the parts of the CTAs from `first` to `last` together: afterwards exchange.o, row_most and
// row_sum have the unit's.
template <int kHeadDim, int kRows, int kWarps>
__device__ __forceinline__ void join_parts(const DecodeParams& p, int first, int last,
                                           Exchange<kHeadDim, kRows, kWarps>& exchange) {
  constexpr int kOwn = kOwnRows<kRows, kWarps>, kPieces = kOwn * kHeadDim / 4;
  constexpr int kEach = (kPieces + 31) / 32;        // pieces of four columns, of a lane
  constexpr int kTogether = kEach < 4 ? kEach : 4;  // for which it walks the parts once: registers limit them
  constexpr int kFew = 4, kMany = 16 / kTogether;   // parts that are asked for at once
  constexpr int64_t kPart = kPartFloats<kHeadDim, kRows>;
  const int lane = threadIdx.x % 32, own = int(threadIdx.x) / 32 * kOwn;
#pragma unroll 1
  for (int piece = lane; piece < kPieces; piece += kTogether * 32) {
    float most[kTogether], sum[kTogether] = {};
    float4 o[kTogether];
    const auto row = [&](int k) { return own + min(piece + k * 32, kPieces - 1) / (kHeadDim / 4); };
    const auto column = [&](int k) { return 4 * (min(piece + k * 32, kPieces - 1) % (kHeadDim / 4)); };
#pragma unroll
    for (int k = 0; k < kTogether; ++k) most[k] = -INFINITY, o[k] = make_float4(0.f, 0.f, 0.f, 0.f);
    const auto add = [&](auto batch) {
      constexpr int kBatch = batch;
#pragma unroll 1
      for (int c = first; c <= last; c += kBatch) {
        float2 score[kTogether][kBatch];  // the largest score and the sum
        float4 x[kTogether][kBatch];
        const float *const begin = p.parts + slot_of(c, first) * kPart, *const rest = p.parts + slot_of(c, -1) * kPart;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            const float* const from = i == 0 ? begin : rest + 2 * i * kPart;
            score[k][i] = load_score(from + kRows * kHeadDim + 2 * row(k), c + i <= last);
            x[k][i] = load_result(from + row(k) * kHeadDim + column(k), c + i <= last);
          }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          float larger = most[k];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) larger = fmaxf(larger, score[k][i].x);
          const float shrink = weight(most[k], larger);
          most[k] = larger, sum[k] *= shrink;
          o[k].x *= shrink, o[k].y *= shrink, o[k].z *= shrink, o[k].w *= shrink;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const float factor = weight(score[k][i].x, larger);
            sum[k] += factor * score[k][i].y;
            o[k].x += factor * x[k][i].x, o[k].y += factor * x[k][i].y;
            o[k].z += factor * x[k][i].z, o[k].w += factor * x[k][i].w;
          }
        }
      }
    };
    if (kMany > kFew && last - first < kFew) {
      add(std::integral_constant<int, kFew>());
    } else {
      add(std::integral_constant<int, kMany>());
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (piece + k * 32 >= kPieces) break;
      *reinterpret_cast<float4*>(exchange.o + row(k) * kResultPitch<kHeadDim> + column(k)) = o[k];
      if (column(k) == 0) exchange.row_most[row(k)] = most[k], exchange.row_sum[row(k)] = sum[k];
    }
  }
  __syncwarp();
}

}  // namespace fp8cutlass::decode
