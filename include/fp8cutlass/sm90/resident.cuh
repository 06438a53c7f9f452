// Attention over few keys from 16 bits in one kernel. A CTA reads K and V of a head once, quantises them, and keeps
// them in shared memory as e4m3 while its row tiles pass. No operand is written to memory. Every warp loads, converts
// and multiplies in turn; several CTAs an SM, or several warpgroups a CTA, overlap these.
//
// The numbers are those of the kernels of templates/sm90a with tiles of 128 keys.
#pragma once

#include <cstdint>

#include "fp8cutlass/epilogue.cuh"
#include "fp8cutlass/resident_params.h"
#include "fp8cutlass/sm90/operand.h"
#include "fp8cutlass/sm90/resident_convert.cuh"
#include "fp8cutlass/sm90/wgmma.cuh"
#include "fp8cutlass/softmax.cuh"
#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass::sm90 {

// For the LSE, a lane's part of the unquantised exponentials of its two rows, of the row tile and of the tile of keys:
// here, as registers are few.
struct ExactSums {
  float2 item, tile;
};

// The numbers of a kernel: kMostKeys keys at most, kWarpgroups of a CTA, kCtas an SM.
template <int kHeadDim_, int kMostKeys_, int kWarpgroups_, int kCtas_>
struct Resident {
  static constexpr int kHeadDim = kHeadDim_, kMostKeys = kMostKeys_, kWarpgroups = kWarpgroups_, kCtas = kCtas_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kRows = 64;                                  // of a row tile, a warpgroup's
  static constexpr int kTileN = kMostKeys < 128 ? kMostKeys : 128;  // keys of a tile, and of a block descale
  static constexpr int kTiles = kMostKeys / kTileN;
  static_assert(kMostKeys % kTileN == 0 && kTileN % 64 == 0 && (kHeadDim == 64 || kHeadDim == 128));
  // O, P V and P of several tiles do not fit the registers at head_dim 128: P V is made in two parts.
  static constexpr int kParts = kTiles > 1 && kHeadDim == 128 ? 2 : 1;
  static constexpr int kPartColumns = kHeadDim / kParts;

  // See resident_convert.cuh.
  static constexpr int kLanes = kHeadDim / 16, kRowStep = 128 / kLanes;
  static constexpr int kPasses = kTileN / kRowStep, kQueryPasses = kRows / kRowStep;
  static constexpr int kGroups = kTileN / 16, kTasks = kHeadDim / 64 * kGroups / 4;

  // Whether the registers hold a block of K and one of V, so that both are asked for at once.
  static constexpr int kRegisters = 65536 / (kThreads * kCtas) < 255 ? 65536 / (kThreads * kCtas) / 8 * 8 : 255;
  static constexpr bool kBoth = kWarpgroups == 1 && 8 * kPasses + 16 * kTasks + (kTiles > 1 ? 80 : 64) <= kRegisters;

  using QTile = OperandTile<kRows, kHeadDim>;
  using KTile = OperandTile<kTileN, kHeadDim>;
  using VTile = OperandTile<kHeadDim + 8, kTileN>;  // V^T: the columns of the first part, 8 rows of ones, the others
  static constexpr int kVBytes = (VTile::kBytes + 1023) / 1024 * 1024;
  // Where a row of packed V^T lies in it, and where its ones do.
  static constexpr __host__ __device__ int value_row(int row) { return row < kPartColumns ? row : row + 8; }

  struct Storage {
    alignas(1024) uint8_t q[kWarpgroups][QTile::kBytes];
    alignas(1024) uint8_t k[kTiles][KTile::kBytes];
    alignas(1024) uint8_t v[kTiles][kVBytes];
    alignas(16) uint8_t source[kWarpgroups][2 * kRows * kHeadDim];  // Q in 16 bits, as each thread copies it for itself
    ExactSums exact[kThreads];
    float slope[kWarpgroups][kRows];  // softmax scale times Q's descale, as codes a score unit of K's descale
    float2 descale[kTiles];           // of K and of V
    uint32_t largest[2 * kTiles][4];  // of each warp that converts
  };
};

// A head of K and V with the row tiles of an item.
struct ResidentItem {
  int batch, kv_head;  // kv_head: in its batch element
  int tile, end;       // row tiles, of all query heads that share it

  __device__ __forceinline__ ResidentItem(const ResidentParams& params, int number) {
    const ForwardParams& p = params.p;
    const int head = number / params.head_items;
    batch = head / p.kv_heads, kv_head = head % p.kv_heads;
    tile = number % params.head_items * params.item_tiles;
    end = min(tile + params.item_tiles, params.row_tiles * (p.heads / p.kv_heads));
  }
};

// 64 rows of one query head.
struct RowTileAt {
  int head, row;  // head: in its batch element
  __device__ __forceinline__ RowTileAt(const ResidentParams& params, const ResidentItem& item, int tile) {
    const int group = params.p.heads / params.p.kv_heads;
    head = item.kv_head * group + tile / params.row_tiles;
    row = tile % params.row_tiles * 64;
  }
};

__device__ __forceinline__ SourceRows query_rows(const ResidentParams& params, int batch, const RowTileAt& at) {
  const ForwardParams& p = params.p;
  return {p.q + batch * p.q_stride_batch + at.head * p.q_stride_head + at.row * p.q_stride_row, p.q_stride_row,
          p.seqlen_q - at.row, p.query.columns};
}
__device__ __forceinline__ SourceRows key_rows(const ResidentParams& params, const ResidentItem& item, int key) {
  const ForwardParams& p = params.p;
  return {p.k + item.batch * p.k_stride_batch + item.kv_head * p.k_stride_head + key * p.k_stride_row, p.k_stride_row,
          p.seqlen_k - key, p.query.columns};
}
__device__ __forceinline__ SourceRows value_rows(const ResidentParams& params, const ResidentItem& item, int key) {
  const ForwardParams& p = params.p;
  return {p.v + item.batch * params.v_stride_batch + item.kv_head * params.v_stride_head + key * params.v_stride_row,
          params.v_stride_row, p.seqlen_k - key, p.query.columns};
}

// K and V of an item to shared memory. Warpgroups take the blocks of K and V in turns.
template <class R, class Source>
__device__ __forceinline__ void fill(const ResidentParams& params, typename R::Storage& shared,
                                     const ResidentItem& item, int tiles, int warpgroup) {
  const QueryScaling& s = params.p.query;
  if constexpr (R::kBoth) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      uint4 k[R::kPasses][2], v[R::kTasks][4];
      load_rows<R>(k, key_rows(params, item, tile * R::kTileN));
      load_columns<R>(v, value_rows(params, item, tile * R::kTileN));
      const float k_descale =
          convert_keys<R, Source>(shared.k[tile], k, shared.largest[2 * tile], warpgroup, s.limit, s.limit_reciprocal);
      const float v_descale = convert_values<R, Source>(shared.v[tile], v, shared.largest[2 * tile + 1], warpgroup,
                                                        params.v_limit, params.v_limit_reciprocal);
      if (threadIdx.x == 0) shared.descale[tile] = make_float2(k_descale, v_descale);
    }
  } else {
#pragma unroll 1
    for (int unit = warpgroup; unit < 2 * tiles; unit += R::kWarpgroups) {
      const int tile = unit / 2;
      if (unit % 2 == 0) {
        uint4 k[R::kPasses][2];
        load_rows<R>(k, key_rows(params, item, tile * R::kTileN));
        const float descale =
            convert_keys<R, Source>(shared.k[tile], k, shared.largest[unit], warpgroup, s.limit, s.limit_reciprocal);
        if (threadIdx.x % 128 == 0) shared.descale[tile].x = descale;
      } else {
        uint4 v[R::kTasks][4];
        load_columns<R>(v, value_rows(params, item, tile * R::kTileN));
        const float descale = convert_values<R, Source>(shared.v[tile], v, shared.largest[unit], warpgroup,
                                                        params.v_limit, params.v_limit_reciprocal);
        if (threadIdx.x % 128 == 0) shared.descale[tile].y = descale;
      }
    }
  }
}

// The warpgroup instructions of a kernel.
template <int kKeys>
struct ScoresOf;
template <>
struct ScoresOf<64> {
  using Gmma = cute::SM90::GMMA::MMA_64x64x32_F16E4M3E4M3_SS_TN<>;
};
template <>
struct ScoresOf<128> {
  using Gmma = cute::SM90::GMMA::MMA_64x128x32_F16E4M3E4M3_SS_TN<>;
};
template <int kColumns>
struct ValuesOf;
template <>
struct ValuesOf<64> {
  using Ones = cute::SM90::GMMA::MMA_64x72x32_F32E4M3E4M3_RS_TN<>;
  using Rest = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ValuesOf<128> {
  using Ones = cute::SM90::GMMA::MMA_64x136x32_F32E4M3E4M3_RS_TN<>;
};

// 64 rows, whose Q is in shared memory, over all keys that they see.
template <class R, class Out, Mask kMask>
__device__ __forceinline__ void attend_rows(const ResidentParams& params, typename R::Storage& shared, int batch,
                                            const RowTileAt& at, int warpgroup) {
  using QTile = typename R::QTile;
  using KTile = typename R::KTile;
  using VTile = typename R::VTile;
  constexpr int kTileN = R::kTileN, kDimBlocks = R::kHeadDim / 8, kPartBlocks = R::kPartColumns / 8;
  using Values = ValuesOf<R::kPartColumns>;
  const ForwardParams& p = params.p;
  const bool want_lse = p.lse != nullptr;
  const auto exact_sums = [&]() -> ExactSums& { return shared.exact[thread_index()]; };
  const auto row_in_tile = [] {
    const unsigned thread = thread_index() % 128;
    return int(thread / 32 * 16 + thread % 32 / 4);
  };
  const uint32_t q = QTile::descriptor(shared_address(shared.q[warpgroup]));
  const uint32_t k_tiles = KTile::descriptor(shared_address(shared.k[0]));
  const uint32_t v_tiles = VTile::descriptor(shared_address(shared.v[0]));
  const int rows_end = min(at.row + 64, p.seqlen_q);
  const int tiles = R::kTiles == 1 ? 1 : tiles_of<kTileN, kMask>(at.row, rows_end, p.seqlen_k, band_of(p)).count;

  float o[kDimBlocks][4];
  float ref[2], sum[2], weight[2], beta[2];
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const bool first = R::kTiles == 1 || tile == 0;
    uint32_t s[kTileN / 8][2], prob[kTileN / 32][4];
    const bool masked = is_masked<kTileN, 64, kMask>(at.row, p.seqlen_k, band_of(p), tile);
    cute::warpgroup_arrive();
    issue_scores<typename ScoresOf<kTileN>::Gmma, QTile, KTile>(s, q, k_tiles + tile * (KTile::kBytes / 16));
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence(s);
    if (masked) {
      int last[2];  // the last key, relative to the tile, that each of the two rows sees
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        last[r] = p.seqlen_k - 1 - tile * kTileN;
        if (kMask != Mask::full)
          last[r] = min(last[r], at.row + row_in_tile() + 8 * r + band_of(p).last - tile * kTileN);
      }
      mask_columns(s, last);
    }
    float slope[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      slope[r] = fminf(fmaxf(shared.slope[warpgroup][row_in_tile() + 8 * r] * shared.descale[tile].x, kMinCodeSlope),
                       kMaxSlope);
    softmax_by_code<Code::linear>(s, slope, weight, want_lse,
                                  [&](float x, float y) { exact_sums().tile = make_float2(x, y); });
    pack_p(prob, s);

    float t[kPartBlocks + 1][4];  // P V of one tile, first part; its last block is the row sums
    fence(prob);
    cute::warpgroup_arrive();
    issue_values<typename Values::Ones, VTile>(t, prob, {v_tiles + tile * (R::kVBytes / 16)});
    cute::warpgroup_commit_batch();
    const auto rescale = [&](int r, float x) {
#pragma unroll
      for (int n = 0; n < kDimBlocks; ++n) o[n][2 * r] *= x, o[n][2 * r + 1] *= x;
      sum[r] *= x;
      if (want_lse) (r == 0 ? exact_sums().item.x : exact_sums().item.y) *= x;
    };
    weigh(ref, weight, first, beta, rescale);
    if (want_lse) {
      const float2 exact = exact_sums().tile, before = first ? make_float2(0.f, 0.f) : exact_sums().item;
      exact_sums().item = make_float2(fmaf(beta[0], exact.x, before.x), fmaf(beta[1], exact.y, before.y));
    }
    const float factor[2] = {beta[0] * shared.descale[tile].y, beta[1] * shared.descale[tile].y};
    const auto promote = [&](const auto& product, int part) {
#pragma unroll
      for (int n = 0; n < kPartBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& to = o[part * kPartBlocks + n][i];
          to = first ? factor[i / 2] * product[n][i] : fmaf(factor[i / 2], product[n][i], to);
        }
    };
    cute::warpgroup_wait<0>();
    fence(t);
    promote(t, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] = first ? beta[r] * t[kPartBlocks][2 * r] : fmaf(beta[r], t[kPartBlocks][2 * r], sum[r]);
    if constexpr (R::kParts > 1) {
      float rest[kPartBlocks][4];
      fence(prob);
      cute::warpgroup_arrive();
      issue_values<typename Values::Rest, VTile>(rest, prob, {v_tiles + tile * (R::kVBytes / 16)},
                                                 R::value_row(R::kPartColumns));
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(rest);
      promote(rest, 1);
    }
  }
  const int row = at.row + row_in_tile();
  if (__any_sync(~0u, want_lse || p.amax != nullptr || p.sinks != nullptr || sum[0] == 0.f || sum[1] == 0.f)) {
    clear_dead_rows(o, sum);
    if (want_lse) {
      const auto place = [&](int i) { return (int64_t(batch) * p.heads + at.head) * p.seqlen_q + i; };
      const float2 exact = exact_sums().item;
      store_lse(p, place, p.seqlen_q, row, {exact.x, exact.y}, ref);
    }
    if (p.sinks != nullptr) add_sink(sum, ref, p, at.head, kExcess<Code::linear>);
    if (p.amax != nullptr) store_amax(p, p.seqlen_q, row, o, sum, 1.f, nullptr);
  }
  const int64_t begin = batch * p.o_stride_batch + at.head * p.o_stride_head + row * p.o_stride_row;
  store_rows<Out>(p, begin, p.seqlen_q, row, o, sum, 1.f, nullptr, 1.f);
}

template <class R, class Source, class Out, Mask kMask>
__device__ __forceinline__ void attend(const ResidentParams& params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using VTile = typename R::VTile;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename R::Storage*>(shared_bytes);
  const ForwardParams& p = params.p;
  const int warpgroup = R::kWarpgroups == 1 ? 0 : __shfl_sync(~0u, threadIdx.x / 128, 0);
  const float unit_slope = p.scale * kLog2e * 8.f;
  const int tiles = R::kTiles == 1 ? 1 : ceil_div(p.seqlen_k, R::kTileN);

  // The rows of ones in V^T, which no conversion ever overwrites.
  constexpr int kOnesWords = 8 * VTile::kWidth / 4;
  for (int i = threadIdx.x; i < R::kTiles * kOnesWords; i += R::kThreads)
    reinterpret_cast<uint32_t*>(shared.v[i / kOnesWords] + R::kPartColumns * VTile::kWidth)[i % kOnesWords] =
        0x38383838u;
  static_assert(VTile::kBlocks == 1);

  // The rows of Q that come next are on their way to shared memory, where there is room.
  uint4* const own = reinterpret_cast<uint4*>(shared.source[warpgroup]) + threadIdx.x % 128;
  bool asked = false;
  const auto ask = [&](const ResidentItem& item, int tile) {
    stage_rows<R>(own, query_rows(params, item.batch, RowTileAt(params, item, tile)));
    asked = true;
  };
#pragma unroll 1
  for (int number = blockIdx.x; number < params.items; number += gridDim.x) {
    const ResidentItem item(params, number);
    if (!asked && item.tile + warpgroup < item.end) ask(item, item.tile + warpgroup);
    fill<R, Source>(params, shared, item, tiles, warpgroup);
    fence_async();
    __syncthreads();
#pragma unroll 1
    for (int tile = item.tile + warpgroup; tile < item.end; tile += R::kWarpgroups) {
      const RowTileAt at(params, item, tile);
      uint4 x[R::kQueryPasses][2];
      take_rows<R>(x, own);
      if (tile > item.tile + warpgroup) sync_warpgroup(warpgroup);  // nobody multiplies the rows before any more
      convert_queries<R, Source>(shared.q[warpgroup], shared.slope[warpgroup], x, p.query, unit_slope);
      asked = false;
      if (tile + R::kWarpgroups < item.end) {
        ask(item, tile + R::kWarpgroups);
      } else if (number + int(gridDim.x) < params.items) {
        const ResidentItem next(params, number + gridDim.x);
        if (next.tile + warpgroup < next.end) ask(next, next.tile + warpgroup);
      }
      fence_async();
      sync_warpgroup(warpgroup);
      attend_rows<R, Out, kMask>(params, shared, item.batch, at, warpgroup);
    }
    __syncthreads();  // nobody multiplies K and V any more
  }
#endif
}

}  // namespace fp8cutlass::sm90
