#include "launch_resident.h"

#include <algorithm>
#include <cstdint>

#include "counters.h"
#include "device.h"
#include "fp8cutlass/sm90/resident_params.h"
#include "kernels.h"
#include "start.h"
#include "tensor_map.h"

namespace fp8cutlass {

namespace {

constexpr int kRows = 64;                         // of a row tile
constexpr int64_t kFewItems = 4, kManyItems = 4;  // of a CTA
constexpr int kMostDealt = 16;                    // items past the last one that a CTA may look at
constexpr int kPlaces = 16;  // of the ring of items, one of which shares a register with the number of a row tile

// An item is all row tiles of the query heads that share a head of K and V. Heads of the last round, which leaves CTAs
// without any, are cut: K and V are then quantised more than once, by CTAs that had nothing to do.
cudaError_t share_out(const ResidentEntry& resident, ResidentParams& params) {
  const ForwardParams& p = params.p;
  const int64_t heads = int64_t{p.batch} * p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t row_tiles = (int64_t{p.seqlen_q} + kRows - 1) / kRows, tiles = row_tiles * group;
  const int64_t ctas = int64_t{p.sm_count} * resident.ctas_per_sm, warpgroups = resident.threads / 128 - 1;
  const int64_t whole = heads / ctas * ctas, rest = heads - whole;
  const int64_t wanted = rest > 0 ? std::max<int64_t>(1, ctas / rest) : 1;  // items of a head
  const int64_t rounds = std::max<int64_t>(1, (tiles + wanted * warpgroups - 1) / (wanted * warpgroups));
  const int64_t item_tiles = std::min(tiles, rounds * warpgroups);
  const int64_t head_items = (tiles + item_tiles - 1) / item_tiles;
  if (tiles > INT32_MAX - kTilePastEnd || whole + rest * head_items + ctas > INT32_MAX ||
      p.seqlen_q > INT32_MAX - kTilePastEnd)
    return cudaErrorInvalidValue;
  params.group = static_cast<int>(group);
  params.head_tiles = static_cast<int>(tiles);
  params.item_tiles = static_cast<int>(item_tiles);
  params.whole = static_cast<int>(whole);
  params.items = static_cast<int>(whole + rest * head_items);
  params.by_head_items = static_cast<int>(head_items);
  params.by_kv_heads = p.kv_heads;
  params.by_row_tiles = static_cast<int>(row_tiles);
  return cudaSuccess;
}

// Items of a ragged batch are a sequence and a head of K and V, and CTAs draw them.
cudaError_t share_sequences(const ResidentEntry& resident, ResidentParams& params, int device, cudaStream_t stream) {
  ForwardParams& p = params.p;
  const int64_t heads = int64_t{p.ragged.sequences} * p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t ctas = int64_t{p.sm_count} * resident.ctas_per_sm, row_tiles = p.seqlen_q / kRows + 1;
  // Nobody here knows how long they are, but on average.
  const int64_t rows = int64_t{p.ragged.sequences} * kRows, average = group * ((p.seqlen_q + rows - 1) / rows);
  int64_t parts = std::clamp<int64_t>(ctas / heads, 1, 2 * average);
  // Some are much longer than others, so that there should be several for a CTA, as long as K and V are multiplied more
  // often than they are quantised.
  if (resident.keys > resident.tile)
    parts = std::max(parts, std::min(kManyItems * ctas / heads, average / (2 * (resident.threads / 128 - 1))));
  const int64_t items = heads * parts;
  if (items + kMostDealt * ctas > INT32_MAX || group * row_tiles > INT32_MAX / kPlaces ||
      p.seqlen_q > INT32_MAX - kTilePastEnd || p.seqlen_k > INT32_MAX - kTilePastEnd)
    return cudaErrorInvalidValue;
  params.group = static_cast<int>(group);
  params.items = static_cast<int>(items);
  params.by_kv_heads = p.kv_heads;
  params.by_group = static_cast<int>(group);
  params.by_head_items = static_cast<int>(parts);
  // To draw is to wait for memory once. A few items of one tile are over sooner, and one is much like another.
  if (items > ctas * (resident.keys > resident.tile ? 1 : kFewItems))
    p.counters = work_counters(device, stream, false).words;
  return cudaSuccess;
}

bool make_maps(sm90::ResidentLaunch& to, const ResidentEntry& resident, unsigned long long context) {
  const MapMaker maps(context);
  const ResidentParams& r = to.params;
  const ForwardParams& p = r.p;
  const int row = 2 * p.query.columns, tile = 2 * resident.head_dim;
  const MapMaker::Rows q{p.q, row, p.seqlen_q, p.heads, p.batch, p.q_stride_row, p.q_stride_head, p.q_stride_batch};
  const MapMaker::Rows k{p.k, row, p.seqlen_k, p.kv_heads, p.batch, p.k_stride_row, p.k_stride_head, p.k_stride_batch};
  const MapMaker::Rows v{p.v, row, p.seqlen_k, p.kv_heads, p.batch, r.v_stride_row, r.v_stride_head, r.v_stride_batch};
  return maps.rows(to.q, q, tile, kRows, to.q_head_step, to.q_batch_step) &&
         maps.rows(to.k, k, tile, resident.tile, to.k_head_step, to.k_batch_step) &&
         maps.rows(to.v, v, tile, resident.tile, to.v_head_step, to.v_batch_step);
}

cudaError_t run(const ResidentEntry& resident, ResidentForm form, const ResidentParams& params, int device,
                cudaStream_t stream) {
  sm90::ResidentLaunch all{};
  all.params = params;
  all.params.p.sm_count = sm_count(device);
  const bool ragged = form == kResidentRaggedFull || form == kResidentRaggedCausal;
  const cudaError_t status =
      ragged ? share_sequences(resident, all.params, device, stream) : share_out(resident, all.params);
  if (status != cudaSuccess) return status;
  if (!has_tensor_maps()) return cudaErrorNotSupported;
  const unsigned long long context = context_id();
  if (!make_maps(all, resident, context)) return cudaErrorInvalidPitchValue;
  const int64_t ctas = std::min<int64_t>(all.params.items, int64_t{all.params.p.sm_count} * resident.ctas_per_sm);
  void* arguments[] = {&all};
  return start(kernel_of(resident, form, device), {ctas, resident.threads, resident.smem_bytes}, arguments, stream,
               context);
}

}  // namespace

void launch(const ResidentEntry& resident, ResidentForm form, ResidentParams params, int device, cudaStream_t stream) {
  check_launch(run(resident, form, params, device, stream), resident.id, device);
}

}  // namespace fp8cutlass
