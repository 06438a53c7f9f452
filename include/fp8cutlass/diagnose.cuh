// What a diagnostic variant writes between the stages of the very kernel under test, so that Q K^T, softmax and P V can
// each be compared with their own reference. Layouts: DiagnosticOutputs in params.h.
#pragma once

#include "fp8cutlass/params.h"
#include "fp8cutlass/schedule.h"

namespace fp8cutlass {

// Scores of one n8 block whose first key is `key`: c[0..1] of `row`, c[2..3] of row + 8.
__device__ inline void diagnose_scores(const ForwardParams& p, int tile_n, int64_t head, int row, int key,
                                       const float (&c)[4]) {
  const int64_t keys = int64_t(ceil_div(p.seqlen_k, tile_n)) * tile_n;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + i / 2 * 8;
    if (r < p.seqlen_q) p.diag.scores[(head * p.seqlen_q + r) * keys + key + threadIdx.x % 4 * 2 + i % 2] = c[i];
  }
}

// P of one tile, un-permuted back to key order, and the tile's weights.
template <int kSteps>
__device__ inline void diagnose_p(const ForwardParams& p, int tile_n, int64_t head, int row, int tile,
                                  const uint32_t (&prob)[kSteps][4], const float (&weight)[2]) {
  const int64_t tiles = ceil_div(p.seqlen_k, tile_n);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int reg = 0; reg < 4; ++reg)
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int r = row + reg % 2 * 8;
        const int key = tile * tile_n + 32 * step + reg / 2 * 16 + byte / 2 * 8 + 2 * t + byte % 2;
        if (r < p.seqlen_q)
          p.diag.p[(head * p.seqlen_q + r) * tiles * tile_n + key] = uint8_t(prob[step][reg] >> (8 * byte));
      }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (t == 0 && row + 8 * r < p.seqlen_q) p.diag.weight[(head * p.seqlen_q + row + 8 * r) * tiles + tile] = weight[r];
}

// P V of one tile and one n8 block of packed columns, before promotion.
__device__ inline void diagnose_values(const ForwardParams& p, int tile_n, int head_dim, int64_t head, int tile,
                                       int row, int block, const float (&t)[4]) {
  const int64_t tiles = ceil_div(p.seqlen_k, tile_n);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + i / 2 * 8;
    const int column = block / 4 * 32 + threadIdx.x % 4 * 8 + block % 4 * 2 + i % 2;
    if (r < p.seqlen_q) p.diag.tile_o[((head * tiles + tile) * p.seqlen_q + r) * head_dim + column] = t[i];
  }
}

}  // namespace fp8cutlass
