// The kernel that quantises and packs while the attention kernel that reads its results runs already. All
// multiprocessors pack the first heads; then most leave, each to a CTA of the attention kernel, and a few go on. What
// counts is therefore not only memory but how little of a multiprocessor a block takes: the copy engine loads blocks,
// two ahead, and stores those of V, so that its warps do nothing but convert.
//
// The bytes are those of pack.cuh, for K and V with descales of blocks. Q is left to the attention kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8cutlass/pack.cuh"
#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/convert.cuh"
#include "fp8cutlass/sm90/kernel_params.h"
#include "fp8cutlass/sm90/operand.h"
#include "fp8cutlass/sm90/tensor_copy.cuh"

namespace fp8cutlass::sm90 {

// The numbers of a kernel: blocks of kRows rows, the group of a block descale. A thread that converts has 64 elements.
template <int kRows_, int kHeadDim_>
struct Delivery {
  static constexpr int kRows = kRows_, kHeadDim = kHeadDim_;
  static constexpr int kWorkers = kRows * kHeadDim / 64;  // threads that convert
  // A warp that loads, and some that report: to see to it that a block is visible takes longer than to convert it.
  static constexpr int kReporters = 3, kThreads = kWorkers + 32 + 32 * kReporters;
  static constexpr int kRun = kDeliveryRun;
  // K: a row belongs to neighbouring lanes, two chunks of 8 elements to each; a lane has four rows.
  static constexpr int kLanes = kHeadDim / 16, kPasses = 4, kRowStep = kRows / kPasses;
  // V: a lane has two columns of 16 keys, twice. A warp reads 64 columns of a key at a time.
  static constexpr int kWarps = kWorkers / 32, kGroups = kRows / 16, kTasks = 2;
  static constexpr int kSpread = kGroups % 8 == 0 ? 8 : 4;  // groups that the lanes of a warp have at a time

  using SourceTile = OperandTile<kRows, 2 * kHeadDim>;
  using ValueTile = OperandTile<kHeadDim, kRows>;
  static constexpr int kBuffers = 2, kUnits = 8;  // units are read until they have been reported

  struct Storage {
    alignas(1024) uint8_t source[kBuffers][SourceTile::kBytes];
    alignas(1024) uint8_t values[kBuffers][ValueTile::kBytes];
    Unit units[kUnits];
    uint32_t largest[kBuffers][kWarps];  // of each warp
    Barrier full[kBuffers], empty[kBuffers];
    Barrier stored[kBuffers];  // values are in memory, or were not written
    Barrier written[kReporters], reported[kReporters];
  };
  // Of a multiprocessor: as many as its memory and its registers, 80 a thread, have room for.
  static constexpr int kCtas = std::min(227 * 1024 / (int(sizeof(Storage)) + 1024), 65536 / (80 * kThreads));
  static_assert((kHeadDim == 64 || kHeadDim == 128) && kRows % 64 == 0 && kCtas > 0);
  static_assert(kWarps * kTasks == kHeadDim / 64 * kGroups);
};

// Block number n, head by head: those of V, then those of K.
__device__ __forceinline__ packing::Block block_of(const PackParams& p, unsigned n) {
  const unsigned head = n / p.handover.head_blocks, inside = n - head * p.handover.head_blocks;
  const unsigned of_v = p.operand[kPackV].blocks;
  return inside < of_v ? packing::Block{kPackV, int(head), int(inside)}
                       : packing::Block{kPackK, int(head), int(inside - of_v)};
}

// The number of this CTA's next run of blocks, after its first one, or -1 where it has to leave. `keeps`: it goes on,
// as CTAs do on a few multiprocessors, and as many in all as these hold, wherever they are: were there none, nobody
// would pack the rest.
template <int kRun>
__device__ __forceinline__ int draw_blocks(const Handover& h, bool& keeps) {
  if (!keeps) {
    unsigned sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    keeps = sm < unsigned(h.keep) || int(atomicAdd(h.counters + 1, 1u)) >= int(gridDim.x) - h.kept_ctas;
    if (!keeps) return -1;
  }
  const unsigned n = kRun * (gridDim.x + atomicAdd(h.counters, 1u));
  return n < unsigned(h.blocks) ? int(n) : -1;
}

// One lane: which blocks, and their loads.
template <class D>
__device__ __forceinline__ void fetch_blocks(const DeliverParams& params, typename D::Storage& shared) {
  using Tile = typename D::SourceTile;
  const PackParams& p = params.p;
  int number = D::kRun * blockIdx.x, ends = 0;
  bool keeps = false;
  for (unsigned turn = 0;; ++turn) {
    const unsigned slot = turn % D::kBuffers;
    wait(shared.empty[slot], (turn / D::kBuffers & 1) ^ 1);
    Unit& unit = shared.units[turn % D::kUnits];
    if (number < 0) {  // once for each of those that report
      unit.block.operand = -1;
      arrive(shared.full[slot]);
      if (++ends == D::kReporters) return;
      continue;
    }
    const packing::Block block = block_of(p, number);
    const PackOperand& o = p.operand[block.operand];
    const int batch = block.head / o.heads, head = block.head - batch * o.heads;
    unit = {block,
            o.out + batch * o.out_stride_batch + head * o.out_stride_head + block.index * D::kRows * o.out_stride_row};
    arrive_expect(shared.full[slot], Tile::kBytes);
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b)
      BoxCopy::copy(&params.source[block.operand], &shared.full[slot], kEvictFirst,
                    shared.source[slot] + b * Tile::kBlockBytes, b * Tile::kWidth, block.index * D::kRows,
                    head * params.head_step[block.operand], batch * params.batch_step[block.operand]);
    ++number;  // runs begin at multiples, and only the last may be shorter
    if (number % D::kRun == 0 || number == p.handover.blocks) number = draw_blocks<D::kRun>(p.handover, keeps);
  }
}

// One lane, for every kReporters-th block: blocks of V to memory, and word that a block is there.
template <class D>
__device__ __forceinline__ void report_blocks(const DeliverParams& params, typename D::Storage& shared,
                                              unsigned reporter) {
  using Tile = typename D::ValueTile;
  const PackParams& p = params.p;
  for (unsigned turn = reporter;; turn += D::kReporters) {
    const unsigned slot = turn % D::kBuffers;
    wait(shared.written[reporter], turn / D::kReporters & 1);
    const Unit& unit = shared.units[turn % D::kUnits];
    const packing::Block block = unit.block;
    if (block.operand < 0) {
      arrive(shared.stored[slot]);
      return;
    }
    if (block.operand == kPackV) {
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b)
        store_box(&params.values, shared.values[slot] + b * Tile::kBlockBytes,
                  block.index * D::kRows + b * Tile::kWidth, 0, block.head);
      commit_stores();
      wait_until_read();
      arrive(shared.stored[slot]);
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.proxy.async.global;" ::: "memory");
    } else {
      arrive(shared.stored[slot]);
    }
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.handover.ready + block.head) : "memory");
    arrive(shared.reported[reporter]);
  }
}

template <class D, class Source>
__device__ __forceinline__ void convert_blocks(const PackParams& p, typename D::Storage& shared) {
  int ends = 0;
  for (unsigned turn = 0; ends < D::kReporters; ++turn) {
    const unsigned slot = turn % D::kBuffers, parity = turn / D::kBuffers & 1, reporter = turn % D::kReporters;
    wait(shared.full[slot], parity);
    wait(shared.stored[slot], parity ^ 1);
    wait(shared.reported[reporter], (turn / D::kReporters & 1) ^ 1);
    const Unit& unit = shared.units[turn % D::kUnits];
    if (unit.block.operand == kPackV) {
      deliver_columns<D, Source>(p.operand[kPackV], unit.block, shared.source[slot], shared.values[slot],
                                 shared.empty[slot], shared.largest[slot]);
    } else if (unit.block.operand == kPackK) {
      deliver_rows<D, Source>(p.operand[kPackK], unit, shared.source[slot], shared.empty[slot], shared.largest[slot]);
    } else {
      arrive(shared.empty[slot]);
      ++ends;
    }
    arrive(shared.written[reporter]);
  }
}

template <class D, class Source>
__device__ __forceinline__ void deliver(const DeliverParams& params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Its alignment would be that of all kernels of the file, of which others have static memory beside it. This one has
  // none, so that it begins where shared memory does.
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  if (shared_address(shared_bytes) % 1024 != 0) __trap();
  auto& shared = *reinterpret_cast<typename D::Storage*>(shared_bytes);
  dependents_may_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < D::kBuffers; ++i) {
      init(shared.full[i], 1), init(shared.empty[i], D::kWorkers);
      init(shared.stored[i], 1);
    }
    for (int i = 0; i < D::kReporters; ++i) init(shared.written[i], D::kWorkers), init(shared.reported[i], 1);
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x < D::kWorkers) {
    convert_blocks<D, Source>(params.p, shared);
  } else if (threadIdx.x == D::kWorkers) {
    fetch_blocks<D>(params, shared);
  } else if (threadIdx.x % 32 == 0) {
    report_blocks<D>(params, shared, threadIdx.x / 32 - D::kWarps - 1);
  }
#endif
}

}  // namespace fp8cutlass::sm90
