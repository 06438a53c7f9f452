#include "launch.h"

#include <cstdint>

#include "counters.h"
#include "device.h"

namespace fp8cutlass {

void launch(const VariantEntry& variant, ForwardParams& params, int device, cudaStream_t stream) {
  params.sm_count = sm_count(device);
  // Only where there are more items than CTAs at a time is anything left to draw.
  const int64_t m_tiles = (int64_t{params.seqlen_q} + variant.tile_m - 1) / variant.tile_m;
  const int64_t items =
      params.ragged.most > 0 ? int64_t{params.ragged.most} * params.heads : m_tiles * params.batch * params.heads;
  if (params.counters == nullptr && variant.draws && items > params.sm_count)
    params.counters = work_counters(device, stream, false).words;
  check_launch(variant.launch(params, stream), variant.id, device);
}

}  // namespace fp8cutlass
