// Attention over few keys from 16 bits in one kernel. One warpgroup turns K and V of a head into e4m3 tiles in shared
// memory, a head ahead of those that multiply them by their row tiles. No operand is written to memory. The copy engine
// loads blocks of 16 bits meanwhile, so that memory always has something to do.
//
// The numbers are those of the kernels of templates/sm90a with tiles of 128 keys.
#pragma once

#include <cstdint>

#include "fp8cutlass/epilogue.cuh"
#include "fp8cutlass/sm90/resident_convert.cuh"
#include "fp8cutlass/sm90/resident_items.cuh"
#include "fp8cutlass/sm90/resident_ragged.cuh"
#include "fp8cutlass/sm90/resident_tiles.cuh"
#include "fp8cutlass/sm90/tensor_copy.cuh"
#include "fp8cutlass/sm90/wgmma.cuh"
#include "fp8cutlass/softmax.cuh"
#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass::sm90 {

// 64 rows, whose Q is in shared memory, over all keys that they see. `frees`: they are the last of the item that this
// warpgroup multiplies, so that a tile's slot is free behind it. Returns how many tiles they see.
template <class R, class Out, Mask kMask, class At, class Frees>
__device__ __forceinline__ int attend_rows(const ResidentParams& params, typename R::Storage& shared, const At& at,
                                           const Frees& frees, int warpgroup) {
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
  const uint32_t k_tiles = KTile::descriptor(shared_address(shared.k[0]));
  const uint32_t v_tiles = VTile::descriptor(shared_address(shared.v[0]));
  const int rows_end = min(at.row() + 64, at.rows(p));
  const int tiles = R::kTiles == 1 ? 1 : tiles_of<kTileN, kMask>(at.row(), rows_end, at.keys(p), at.band(p)).count;

  float o[kDimBlocks][4];
  float ref[2], sum[2] = {}, weight[2], beta[2];
  if constexpr (R::kTiles > 1) {
#pragma unroll
    for (int n = 0; n < kDimBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.f;
  }
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const bool first = R::kTiles == 1 || tile == 0;
    uint32_t s[kTileN / 8][2], prob[kTileN / 32][4];
    const int number = at.first_tile() + tile, slot = R::slot_of(number);
    wait(shared.there[slot], R::round_of(number) & 1);
    const bool masked = is_masked<kTileN, 64, kMask>(at.row(), at.keys(p), at.band(p), tile);
    uint32_t q = QTile::descriptor(shared_address(shared.q[warpgroup]));
    asm volatile("" : "+r"(q));  // made here, as registers are few
    cute::warpgroup_arrive();
    issue_scores<typename ScoresOf<kTileN>::Gmma, QTile, KTile>(s, q, k_tiles + slot * (KTile::kBytes / 16));
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence(s);
    if (masked) {
      int last[2];  // the last key, relative to the tile, that each of the two rows sees
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        last[r] = at.keys(p) - 1 - tile * kTileN;
        if (kMask != Mask::full)
          last[r] = min(last[r], at.row() + row_in_tile() + 8 * r + at.band(p).last - tile * kTileN);
      }
      mask_columns(s, last);
    }
    float slope[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      slope[r] = fminf(fmaxf(shared.slope[warpgroup][row_in_tile() + 8 * r] * shared.descale[slot].x, kMinCodeSlope),
                       kMaxSlope);
    softmax_by_code<Code::linear>(s, slope, weight, want_lse,
                                  [&](float x, float y) { exact_sums().tile = make_float2(x, y); });
    pack_p(prob, s);

    float t[kPartBlocks + 1][4];  // P V of one tile, first part; its last block is the row sums
    fence(prob);
    cute::warpgroup_arrive();
    issue_values<typename Values::Ones, VTile>(t, prob, {v_tiles + slot * (R::kVBytes / 16)});
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
    const float factor[2] = {beta[0] * shared.descale[slot].y, beta[1] * shared.descale[slot].y};
    const auto promote = [&](const auto& product, int part) {
#pragma unroll
      for (int n = 0; n < kPartBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& to = o[part * kPartBlocks + n][i];
          to = R::kTiles == 1 ? factor[i / 2] * product[n][i] : fmaf(factor[i / 2], product[n][i], to);
        }
    };
    cute::warpgroup_wait<0>();
    fence(t);
    promote(t, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(beta[r], t[kPartBlocks][2 * r], sum[r]);
    if constexpr (R::kParts > 1) {
      float rest[kPartBlocks][4];
      fence(prob);
      cute::warpgroup_arrive();
      issue_values<typename Values::Rest, VTile>(rest, prob, {v_tiles + slot * (R::kVBytes / 16)},
                                                 R::value_row(R::kPartColumns));
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(rest);
      promote(rest, 1);
    }
    arrive_if(shared.free[slot], frees());
  }
  const int row = at.row() + row_in_tile();
  if (__any_sync(~0u, want_lse || p.amax != nullptr || p.sinks != nullptr || sum[0] == 0.f || sum[1] == 0.f)) {
    clear_dead_rows(o, sum);
    if (want_lse) {
      const auto place = [&](int i) { return at.lse(p, i); };
      const float2 exact = exact_sums().item;
      store_lse(p, place, at.rows(p), row, {exact.x, exact.y}, ref);
    }
    if (p.sinks != nullptr) add_sink(sum, ref, p, at.head(), kExcess<Code::linear>);
    if (p.amax != nullptr) store_amax(p, at.rows(p), row, o, sum, 1.f, nullptr);
  }
  store_rows<Out>(p, at.out(p, row), at.rows(p), row, o, sum, 1.f, nullptr, 1.f);
  return tiles;
}

// ---- the warpgroup that converts
// -------------------------------------------------------------------------------------

template <class R, class Source, class Walk>
__device__ __forceinline__ void convert_heads(const ResidentLaunch& launch, typename R::Storage& shared, int tiles) {
  using Block = typename R::KeySource;
  const ResidentParams& params = launch.params;
  const QueryScaling& s = params.p.query;
  const bool leads = threadIdx.x == R::kMultiplying;
  typename Walk::Blocks next(params, shared, tiles, leads);  // of the block that is loaded next
  const auto load = [&] {
    if (!leads || !next.there(params)) return;
    Barrier& full = shared.source_full[next.number % R::kStages];
    uint8_t* const to = shared.key_source[next.number % R::kStages];
    arrive_expect(full, Block::kBytes);
    const bool of_v = next.number % 2 != 0;
#pragma unroll
    for (int b = 0; b < Block::kBlocks; ++b)
      BoxCopy::copy(of_v ? &launch.v : &launch.k, &full, kEvictNormal, to + b * Block::kBlockBytes, b * Block::kWidth,
                    next.row(), next.kv_head * (of_v ? launch.v_head_step : launch.k_head_step),
                    next.batch * (of_v ? launch.v_batch_step : launch.k_batch_step));
    next.go_on(params);
  };
#pragma unroll 1
  for (int i = 0; i < R::kStages; ++i) load();
  typename Walk::Tiles at(params, shared, tiles);
#pragma unroll 1
  for (; at.there(); at.go_on()) {
    const int number = at.number, slot = R::slot_of(number), block = 2 * number;
    const bool cut = Walk::Tiles::kCut && at.keys() < R::kTileN;
    auto& of_k = shared.largest[number % 2][0];  // the next ones are told before all have read these
    auto& of_v = shared.largest[number % 2][1];
    const auto ask = [&](int of) -> const uint8_t* {  // when it is there
      wait(shared.source_full[of % R::kStages], of / R::kStages & 1);
      return shared.key_source[of % R::kStages];
    };
    uint4 k[R::kPasses][2], v[R::kTasks][4];
    take_rows<R, Block>(k, ask(block));
    if (cut) clear_keys<R>(k, at.keys());
    if constexpr (R::kBoth) {
      take_columns<R, Block>(v, ask(block + 1));
      if (cut) clear_values<R>(v, at.keys());
    }
    tell_largest<Source>(of_k, k);
    if constexpr (R::kBoth) tell_largest<Source>(of_v, v);
    sync_warpgroup();
    load();  // all have read what was there
    if constexpr (R::kBoth) load();
    wait(shared.free[slot], (R::round_of(number) & 1) ^ 1);  // a fresh barrier counts as passed with parity 1
    const packing::Scale k_scale = block_scale<Source>(of_k, s.limit, s.limit_reciprocal);
    convert_keys<R, Source>(shared.k[slot], k, k_scale.inverse);
    if constexpr (!R::kBoth) {
      take_columns<R, Block>(v, ask(block + 1));
      if (cut) clear_values<R>(v, at.keys());
      tell_largest<Source>(of_v, v);
      sync_warpgroup();
      load();
    }
    const packing::Scale v_scale = block_scale<Source>(of_v, params.v_limit, params.v_limit_reciprocal);
    convert_values<R, Source>(shared.v[slot], v, v_scale.inverse);
    if (leads) shared.descale[slot] = make_float2(k_scale.descale, v_scale.descale);
    fence_async();
    arrive(shared.there[slot]);
  }
}

// ---- a warpgroup that multiplies
// -------------------------------------------------------------------------------------

template <class R, class Source, class Out, Mask kMask, class Walk>
__device__ __forceinline__ void attend_heads(const ResidentLaunch& launch, typename R::Storage& shared, int tiles,
                                             int warpgroup) {
  using Block = typename R::QuerySource;
  const ResidentParams& params = launch.params;
  const ForwardParams& p = params.p;
  const float unit_slope = p.scale * kLog2e * 8.f;
  Walk::clear_rows(params);
  typename Walk::Rows next(params, shared, tiles, warpgroup);  // of the row tile whose Q is loaded next
  const auto load = [&](const auto& at) {
    if (threadIdx.x % 128 != 0) return;
    Barrier& full = shared.query_full[warpgroup];
    arrive_expect(full, Block::kBytes);
#pragma unroll
    for (int b = 0; b < Block::kBlocks; ++b)
      BoxCopy::copy(&launch.q, &full, kEvictNormal, shared.query_source[warpgroup] + b * Block::kBlockBytes,
                    b * Block::kWidth, at.source_row(), at.head() * launch.q_head_step, at.batch * launch.q_batch_step);
  };
  const auto release = [&](int number, int end) {  // tiles that this warpgroup does not multiply
    for (; number < end; ++number) {
      // An arrival before the tile is there would count for the one before.
      wait(shared.there[R::slot_of(number)], R::round_of(number) & 1);
      arrive(shared.free[R::slot_of(number)]);
    }
  };
  next.begin(release, load);
#pragma unroll 1
  for (int turn = 0; next.there(); ++turn) {
    const auto at = next.at();
    uint4 x[R::kQueryPasses][2];
    wait(shared.query_full[warpgroup], turn & 1);
    take_rows<R, Block>(x, shared.query_source[warpgroup]);
    next.look();
    sync_warpgroup();  // all have read Q, and nobody multiplies the rows before any more
    next.go_on();
    if (next.there()) load(next.at());
    convert_queries<R, Source>(shared.q[warpgroup], shared.slope[warpgroup], x, p.query, unit_slope);
    fence_async();
    sync_warpgroup();
    const auto frees = [&] { return next.has_left(at); };
    const int seen = attend_rows<R, Out, kMask>(params, shared, at, frees, warpgroup);
    if (frees()) next.leave(at, seen, release, load);
  }
}

template <class R, class Source, class Out, Mask kMask, template <class> class Walk>
__device__ __forceinline__ void attend(const ResidentLaunch& launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using VTile = typename R::VTile;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename R::Storage*>(shared_bytes);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int tiles = R::kTiles == 1 ? 1 : ceil_div(launch.params.p.seqlen_k, R::kTileN);
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kWarpgroups; ++i) init(shared.query_full[i], 1);
    for (int i = 0; i < R::kStages; ++i) init(shared.source_full[i], 1);
    for (int i = 0; i < R::kSlots; ++i) init(shared.there[i], 128), init(shared.free[i], R::kMultiplying);
    for (int i = 0; i < R::kTold; ++i) init(shared.told[i], 1), init(shared.read[i], R::kMultiplying);
    fence_init();
  }
  // The rows of ones in V^T, which no conversion ever overwrites.
  constexpr int kOnesWords = 8 * VTile::kWidth / 4;
  for (int i = threadIdx.x; i < R::kSlots * kOnesWords; i += R::kThreads)
    reinterpret_cast<uint32_t*>(shared.v[i / kOnesWords] + R::kPartColumns * VTile::kWidth)[i % kOnesWords] =
        0x38383838u;
  static_assert(VTile::kBlocks == 1);
  fence_async();
  __syncthreads();
  if (warpgroup == R::kWarpgroups) {
    convert_heads<R, Source, Walk<R>>(launch, shared, tiles);
  } else {
    attend_heads<R, Source, Out, kMask, Walk<R>>(launch, shared, tiles, warpgroup);
  }
#endif
}

}  // namespace fp8cutlass::sm90
