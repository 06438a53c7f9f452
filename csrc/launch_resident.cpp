#include "launch_resident.h"

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "kernels.h"
#include "start.h"

namespace fp8cutlass {

namespace {

constexpr int kRows = 64;  // of a row tile

// An item is all row tiles of the query heads that share a head of K and V. Where that would leave CTAs without any,
// a head is cut: K and V are then quantised more than once, by CTAs that had nothing to do.
cudaError_t share_out(const ResidentEntry& resident, ResidentParams& params) {
  const ForwardParams& p = params.p;
  const int64_t heads = int64_t{p.batch} * p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t row_tiles = (int64_t{p.seqlen_q} + kRows - 1) / kRows, tiles = row_tiles * group;
  const int64_t ctas = int64_t{p.sm_count} * resident.ctas_per_sm, warpgroups = resident.threads / 128;
  const int64_t wanted = std::max<int64_t>(1, ctas / heads);  // items of a head
  const int64_t rounds = std::max<int64_t>(1, (tiles + wanted * warpgroups - 1) / (wanted * warpgroups));
  const int64_t item_tiles = std::min(tiles, rounds * warpgroups);
  const int64_t head_items = (tiles + item_tiles - 1) / item_tiles;
  if (tiles > INT32_MAX - kTilePastEnd || heads * head_items + ctas > INT32_MAX ||
      p.seqlen_q > INT32_MAX - kTilePastEnd)
    return cudaErrorInvalidValue;
  params.row_tiles = static_cast<int>(row_tiles);
  params.item_tiles = static_cast<int>(item_tiles);
  params.head_items = static_cast<int>(head_items);
  params.items = static_cast<int>(heads * head_items);
  return cudaSuccess;
}

}  // namespace

void launch(const ResidentEntry& resident, ResidentForm form, ResidentParams params, int device, cudaStream_t stream) {
  params.p.sm_count = sm_count(device);
  cudaError_t status = share_out(resident, params);
  if (status == cudaSuccess) {
    const int64_t ctas = std::min<int64_t>(params.items, int64_t{params.p.sm_count} * resident.ctas_per_sm);
    void* arguments[] = {&params};
    status = start(kernel_of(resident, form, device), {ctas, resident.threads, resident.smem_bytes}, arguments, stream,
                   context_id());
  }
  check_launch(status, resident.id, device);
}

}  // namespace fp8cutlass
