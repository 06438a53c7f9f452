// Which query tile a CTA works on next, and which of its KV tiles. Host-callable.
#pragma once

#include "fp8cutlass/schedule.h"

namespace fp8cutlass::sm90 {

struct alignas(16) Item {
  int tiles;       // KV tiles to visit; 0: there is no more work (or, of a split, nothing for this CTA)
  int first_tile;  // where they begin
  int row;         // first query row
  int batch, head;
  int kv_head;  // batch * kv_heads + head of K and V
};

// How the items of a launch are ordered: `section` heads are finished before the next ones begin.
struct Order {
  int items, section;
};

// K and V of a section stay in L2 while the CTAs that read them walk through. With a causal mask those are at different
// places of it, so a section is as many heads as fit a third of the 50 MB of an H100 (two thirds where rows are wide
// and many, 1 to 3% faster there); without a mask CTAs walk in step, and the heads that share K and V suffice. Sections
// are about equally wide: a narrow last one would leave CTAs idle.
template <int kTileM, int kHeadDim, bool kCausal>
CUTE_HOST_DEVICE Order work_order(const ForwardParams& p) {
  const int64_t l2_bytes = kHeadDim > 128 && p.seqlen_k >= 2048 ? 34'000'000 : 16'000'000;
  const int64_t group = p.heads / p.kv_heads, heads = int64_t(p.batch) * p.heads;
  const int64_t head_bytes = int64_t(p.seqlen_k) * 2 * kHeadDim;
  const int64_t fit = kCausal && l2_bytes > head_bytes ? l2_bytes / head_bytes * group : group;
  const int64_t sections = (heads + fit - 1) / fit;
  return {int(work_items(p, kTileM)), int((heads + sections - 1) / sections)};
}

// Item number `n`. Without a mask: section by section, its heads innermost. With a causal mask items differ in length,
// and who draws a long one last is still at it when the others have gone home. So rows are taken in phases, each over
// all sections and from its last rows to its first: first the upper three quarters of the rows, and a quarter, a
// sixteenth of the work, for the end. Long sequences have few items, all the longer: there, phases halve three times.
template <int kTileM, int kTileN, bool kCausal>
CUTE_HOST_DEVICE Item item_at(const ForwardParams& p, const Order& order, int n) {
  constexpr int kLongTiles = 32;
  const int all_tiles = ceil_div(p.seqlen_q, kTileM), heads = p.batch * p.heads;
  int first_tile = 0, m_tiles = all_tiles;
  if (kCausal) {
    const bool is_long = all_tiles >= kLongTiles;
    first_tile = is_long ? all_tiles / 2 : all_tiles / 4;
    m_tiles = all_tiles - first_tile;
    while (n >= m_tiles * heads) {
      n -= m_tiles * heads;
      m_tiles = first_tile;
      first_tile = is_long && m_tiles > all_tiles / 8 ? m_tiles / 2 : 0;
      m_tiles -= first_tile;
    }
  }
  const int section = n / (order.section * m_tiles), rest = n - section * order.section * m_tiles;
  const int first_head = section * order.section;
  const int width = heads - first_head < order.section ? heads - first_head : order.section;
  const int head = first_head + rest % width;
  Item item;
  item.row = (first_tile + m_tiles - 1 - rest / width) * kTileM;
  item.batch = head / p.heads;
  item.head = head - item.batch * p.heads;
  item.kv_head = item.batch * p.kv_heads + item.head / (p.heads / p.kv_heads);
  int64_t keys = p.seqlen_k;
  if (kCausal) {
    const int rows_end = item.row + kTileM < p.seqlen_q ? item.row + kTileM : p.seqlen_q;
    const int64_t visible = int64_t(rows_end) + p.causal_offset;  // one past the last key that the last row sees
    keys = visible < keys ? visible : keys;
  }
  item.first_tile = 0;
  item.tiles = keys < 1 ? 1 : ceil_div(int(keys), kTileN);  // a tile where all is masked, if need be: no special case
  return item;
}

#ifdef __CUDACC__
// The number of the item after `number`, in lane 0 of a warp: drawn from the launch's counter, so that whoever is done
// first takes the next; or every gridDim.x-th where the launch has none.
__device__ __forceinline__ int draw_item(const ForwardParams& p, int number, int lane) {
  if (p.counters == nullptr) return number + int(gridDim.x);
  const unsigned dealt = p.ready == nullptr ? gridDim.x : 0;
  return lane == 0 ? int(dealt + atomicAdd(p.counters, 1u)) : 0;
}

// The last CTA to leave puts the counters back to zero.
__device__ __forceinline__ void leave_counters(const ForwardParams& p) {
  if (p.counters == nullptr) return;
  __threadfence();  // this CTA's draws come before its leave
  if (atomicAdd(p.counters + 1, 1u) != gridDim.x - 1) return;
  p.counters[0] = p.counters[1] = 0;
}

// ---- where the kernel before hands over its heads while this one runs -----------------------------------------------

// The number of a CTA's first item, for one thread to ask. CTAs begin when they find room, some of them late, and
// perhaps when nothing is left: so that one is drawn, too.
__device__ __forceinline__ int first_item(const ForwardParams& p) {
  return p.ready == nullptr ? int(blockIdx.x) : int(atomicAdd(p.counters, 1u));
}

// Whether K and V of a head are there for this thread and for its copies.
__device__ __forceinline__ bool has_head(const ForwardParams& p, int kv_head) {
  unsigned done;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(p.ready + kv_head) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return done >= unsigned(p.ready_blocks);
}

__device__ __forceinline__ void wait_for_head(const ForwardParams& p, int kv_head) {
  while (!has_head(p, kv_head)) {
  }
}

// leave_counters for a warp, and for the counters of the kernel before, which has ended.
__device__ __forceinline__ void leave_handover(const ForwardParams& p, int lane) {
  unsigned left = 0;
  __threadfence();
  if (lane == 0) left = atomicAdd(p.counters + 1, 1u);
  if (__shfl_sync(~0u, left, 0) != gridDim.x - 1) return;
  __threadfence();
  if (lane < kCounters) p.counters[lane] = 0;
  for (int head = lane; head < p.batch * p.kv_heads; head += 32) p.ready[head] = 0;
}
#endif

// The part of an item that one CTA of a cluster takes. It may be empty.
template <int kSplit>
CUTE_HOST_DEVICE Item part_of(Item item, int rank) {
  const int tiles = item.tiles;
  item.first_tile = tiles * rank / kSplit;
  item.tiles = tiles * (rank + 1) / kSplit - item.first_tile;
  return item;
}

}  // namespace fp8cutlass::sm90
