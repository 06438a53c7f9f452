#include "handover.h"

#include <algorithm>
#include <cstdint>

#include "counters.h"
#include "device.h"

namespace fp8cutlass {

namespace {

// Of the multiprocessors, those that pack while the others attend: 40 of 132. Fewer are done too late, and attention
// waits; more are done sooner, and attend then (docs/lab/pack.md).
constexpr double kKept = 0.3;

}  // namespace

std::unique_lock<std::mutex> hand_over(PackParams& pack, ForwardParams& params, int key_block, int device,
                                       cudaStream_t stream) {
  const PackOperand &k = pack.operand[kPackK], &v = pack.operand[kPackV];
  const bool by_block = k.granularity == Granularity::block && v.granularity == Granularity::block;
  if (params.query.type == QueryType::fp8 || !by_block || pack.k_mean != nullptr || pack.hadamard) return {};
  const auto blocks = [&](const PackOperand& o) { return (int64_t{o.rows} + key_block - 1) / key_block; };
  const int64_t heads = int64_t{params.batch} * params.kv_heads, head_blocks = blocks(k) + blocks(v);
  constexpr int64_t kMostBlocks = INT32_MAX / 2;  // what CTAs draw beyond the last one is 32-bit, too
  if (heads > kReadyHeads || heads * head_blocks > kMostBlocks) return {};
  const WorkCounters counters = work_counters(device, stream, true);
  if (counters.ready == nullptr) return {};
  params.counters = counters.handover;
  params.ready = counters.ready;
  params.ready_blocks = static_cast<int>(head_blocks);
  Handover& h = pack.handover;
  h.counters = counters.handover + kAttentionCounters;
  h.ready = counters.ready;
  h.sm_count = sm_count(device);
  h.keep = std::max(1, static_cast<int>(kKept * h.sm_count + 0.5));
  h.head_blocks = params.ready_blocks;
  h.blocks = static_cast<int>(heads * head_blocks);
  return std::unique_lock<std::mutex>(*counters.in_pairs);
}

void take_back(const ForwardParams& params, cudaStream_t stream) {
  cudaMemsetAsync(params.counters, 0, kCounters * sizeof(unsigned), stream);
  cudaMemsetAsync(params.ready, 0, sizeof(unsigned) * params.batch * params.kv_heads, stream);
}

}  // namespace fp8cutlass
