// Which query tile a CTA works on next, and which of its KV tiles. Host-callable.
#pragma once

#include <cutlass/fast_math.h>

#include "fp8cutlass/schedule.h"

namespace fp8cutlass::sm90 {

struct alignas(16) Item {
  int tiles;       // KV tiles to visit; 0: there is no more work (or, of a split, nothing for this CTA)
  int first_tile;  // where they begin
  int row;         // first query row
  int batch, head;
  int kv_head;  // batch * kv_heads + head of K and V
  int64_t out;  // the element of O where its first row begins
};

// Items are numbered phase by phase, in a phase section by section of heads, in a section row by row from the last one,
// its heads innermost. To find one is the loader's longest way from item to item, so that what it divides by is
// prepared.
struct Phase {
  int first_item;
  int first_tile, tiles;              // of queries, the same of every head
  cutlass::FastDivmod section_items;  // of a section that is not narrower than the others
};

struct Order {
  static constexpr int kMaxPhases = 4;
  int items, section;  // `section` heads are finished before the next ones begin
  int last_section;    // the first head of the last section, which may be narrower
  int phases;
  Phase phase[kMaxPhases];
  cutlass::FastDivmod width, last_width;    // heads of a section, of the last one
  cutlass::FastDivmod heads, heads_per_kv;  // of Q: in all of a batch element, that share K and V
};

// Without a mask there is one phase. With a causal mask items differ in length, and who draws a long one last is still
// at it when the others have gone home. So rows are taken in phases, each over all sections and from its last rows to
// its first: first the upper three quarters of the rows, and a quarter, a sixteenth of the work, for the end. Long
// sequences have few items, all the longer: there, phases halve three times. Short ones have many, which are short, and
// a second phase would read K and V once more: there is one, but where rows are wide, which was not faster.
template <bool kCausal, bool kWide>
CUTE_HOST_DEVICE void add_phases(Order& order, int tiles, int heads) {
  constexpr int kShortTiles = 8, kLongTiles = 32;
  const bool one_phase = !kCausal || (tiles <= kShortTiles && !kWide), is_long = tiles >= kLongTiles;
  int first_item = 0;
  for (int end = tiles; end > 0;) {
    const int first_tile = one_phase ? 0 : is_long ? (end > tiles / 8 ? end / 2 : 0) : end == tiles ? tiles / 4 : 0;
    order.phase[order.phases++] = {first_item, first_tile, end - first_tile, order.section * (end - first_tile)};
    first_item += (end - first_tile) * heads;
    end = first_tile;
  }
}

// K and V of a section stay in L2 while the CTAs that read them walk through. With a causal mask those are at different
// places of it, so a section is as many heads as fit a third of the 50 MB of an H100 (two thirds where rows are wide
// and many, 1 to 3% faster there). Short sequences are 2 to 10% faster with no more heads than would fit it with 2048
// keys (docs/lab/sm90a.md, row 42), as long as these have about two items an SM. Without a mask CTAs walk in step, and
// the heads that share K and V suffice. Sections are about equally wide: a narrow last one would leave CTAs idle.
template <int kTileM, int kHeadDim, bool kCausal>
CUTE_HOST_DEVICE Order work_order(const ForwardParams& p) {
  constexpr int64_t kManyKeys = 2048;
  constexpr bool kWide = kHeadDim > 128;
  const int row_tiles = ceil_div(p.seqlen_q, kTileM);
  const int64_t group = p.heads / p.kv_heads, heads = int64_t(p.batch) * p.heads;
  const int64_t l2_bytes = kWide && p.seqlen_k >= kManyKeys ? 34'000'000 : 16'000'000;
  const auto sections_of = [&](int64_t keys) {  // of which one fits in L2 with so many keys a head
    const int64_t fit = kCausal ? l2_bytes / (keys * 2 * kHeadDim) * group : group;
    return fit > group ? (heads + fit - 1) / fit : heads / group;
  };
  int64_t sections = sections_of(p.seqlen_k);
  if (kCausal && p.seqlen_k < kManyKeys) {
    const int64_t two_items = ceil_div(2 * p.sm_count, row_tiles);  // heads that have two for each SM
    const int64_t narrow = sections_of(kManyKeys), most = (heads + two_items / 2) / two_items;
    const int64_t wanted = narrow < most ? narrow : most;
    sections = wanted > sections ? wanted : sections;
  }
  Order order{};
  order.items = int(work_items(p, kTileM));
  order.section = int((heads + sections - 1) / sections);
  order.last_section = int((heads - 1) / order.section * order.section);
  order.width = order.section;
  order.last_width = int(heads) - order.last_section;
  order.heads = p.heads;
  order.heads_per_kv = int(group);
  add_phases<kCausal, kWide>(order, row_tiles, int(heads));
  return order;
}

// Item number `n`.
template <int kTileM, int kTileN, bool kCausal>
CUTE_HOST_DEVICE Item item_at(const ForwardParams& p, const Order& order, int n) {
  int number = 0;
  while (number + 1 < order.phases && n >= order.phase[number + 1].first_item) ++number;
  const Phase& phase = order.phase[number];
  int section, rest, row, head;
  phase.section_items(section, rest, n - phase.first_item);
  const int first_head = section * order.section;
  (first_head == order.last_section ? order.last_width : order.width)(row, head, rest);
  Item item;
  item.row = (phase.first_tile + phase.tiles - 1 - row) * kTileM;
  order.heads(item.batch, item.head, first_head + head);
  item.kv_head = item.batch * p.kv_heads + order.heads_per_kv.div(item.head);
  int64_t keys = p.seqlen_k;
  if (kCausal) {
    const int rows_end = item.row + kTileM < p.seqlen_q ? item.row + kTileM : p.seqlen_q;
    const int64_t visible = int64_t(rows_end) + p.causal_offset;  // one past the last key that the last row sees
    keys = visible < keys ? visible : keys;
  }
  item.out = item.batch * p.o_stride_batch + item.head * p.o_stride_head + item.row * p.o_stride_row;
  item.first_tile = 0;
  item.tiles = keys < 1 ? 1 : ceil_div(int(keys), kTileN);  // a tile where all is masked, if need be: no special case
  return item;
}

#ifdef __CUDACC__
// The number of a warp's first lane, in all its lanes; of a shuffle the compiler knows that.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Items are drawn from the launch's counter, so that whoever is done first takes the next; every gridDim.x-th is taken
// where the launch has none. Lane 0 of a warp draws; nothing is done with the word until next_item, as the first that
// is done with it waits for memory.
__device__ __forceinline__ unsigned draw_item(const ForwardParams& p, int lane) {
  return p.counters != nullptr && lane == 0 ? atomicAdd(p.counters, 1u) : 0;
}

// The number of the item after `number`, of what draw_item returned. All lanes come here.
__device__ __forceinline__ int next_item(const ForwardParams& p, int number, unsigned drawn) {
  if (p.counters == nullptr) return number + int(gridDim.x);
  const unsigned dealt = p.ready == nullptr ? gridDim.x : 0;
  return int(__shfl_sync(~0u, drawn, 0) + dealt);
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
