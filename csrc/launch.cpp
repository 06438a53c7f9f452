#include "launch.h"

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "counters.h"
#include "device.h"
#include "fp8cutlass/walk/item.h"
#include "fp8cutlass/walk/plan_params.h"
#include "kernels.h"
#include "start.h"
#include "warpgroup.h"

namespace fp8cutlass {

namespace {

// Items of a call; of a ragged batch the most that there can be.
int64_t most_items(const VariantEntry& variant, const ForwardParams& p) {
  return p.ragged.most > 0 ? int64_t{p.ragged.most} * p.heads : work_items(p, variant.tile_m);
}

// A persistent grid that gets pointers.
cudaError_t launch_warp(const VariantEntry& variant, ForwardParams& params, MaskParams mask, int device,
                        cudaStream_t stream) {
  const int64_t items = most_items(variant, params);
  if (items == 0) return cudaSuccess;
  params.item_rows = variant.tile_m;
  const int64_t resident = int64_t{params.sm_count} * variant.ctas_per_sm;
  if (items + resident > INT32_MAX || params.seqlen_q > INT32_MAX - kTilePastEnd ||
      params.seqlen_k > INT32_MAX - kTilePastEnd)
    return cudaErrorInvalidValue;
  int count = static_cast<int>(items);
  void* const third = variant.biased ? static_cast<void*>(&mask.bias) : &mask.lists;  // of kernels for these alone
  void* arguments[] = {&params, &count, third};
  return start(kernel_of(variant, 0, device), {std::min(items, resident), variant.threads, variant.smem_bytes},
               arguments, stream, context_id());
}

// Lists the row tiles of a ragged batch, before the kernel that reads them, and beside the one before where that writes
// nothing which it reads.
cudaError_t launch_plan(const VariantEntry& variant, const ForwardParams& p, int device, cudaStream_t stream) {
  const bool is_warp = variant.family == Family::sm89;
  const int rows = is_warp ? variant.tile_m : fewest_item_rows(p, variant.tile_m, variant.mask);
  planning::PlanParams params{p.ragged, p.seqlen_q, rows, variant.key_block};
  void* arguments[] = {&params};
  const cudaKernel_t kernel = kernel_of(Single::plan, device);
  const LaunchShape shape{1, planning::kThreads, 0};
  return p.ragged.early ? start_beside(kernel, shape, arguments, stream, 0, device)
                        : start(kernel, shape, arguments, stream, 0);
}

}  // namespace

void launch(const VariantEntry& variant, ForwardParams& params, int device, cudaStream_t stream,
            const MaskParams& mask) {
  require(variant.mask != Mask::blocks || mask.lists.tiles != nullptr, "variant ", variant.id, " needs a mask");
  require(!variant.biased || mask.bias.data != nullptr, "variant ", variant.id, " needs a bias");
  params.sm_count = sm_count(device);
  // Only where there are more items than CTAs at a time is anything left to draw.
  if (params.counters == nullptr && variant.draws && most_items(variant, params) > params.sm_count)
    params.counters = work_counters(device, stream, false).words;
  if (variant.ragged) check_launch(launch_plan(variant, params, device, stream), "plan", device);
  const cudaError_t status = variant.family == Family::sm90a ? launch_warpgroup(variant, params, mask, device, stream)
                                                             : launch_warp(variant, params, mask, device, stream);
  check_launch(status, variant.id, device);
}

}  // namespace fp8cutlass
