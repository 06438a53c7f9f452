// The launch ABI of the kernels that keep a head's K and V in shared memory. Plain C++ without CUDA or torch headers.
#pragma once

#include <cstdint>

#include "fp8cutlass/params.h"
#include "fp8cutlass/walk/divisor.h"

namespace fp8cutlass {

// An item is a run of row tiles of the query heads that share one head of K and V, which a CTA quantises once. Of a
// ragged batch `p.ragged` says which these are.
struct ResidentParams {
  ForwardParams p;  // q, k and v are of 16 bits as `query` says, with strides in bytes; there are no descales
  int64_t v_stride_batch, v_stride_head, v_stride_row;  // in bytes
  float v_limit, v_limit_reciprocal;                    // as those of `query`, which count for K as well
  int group;                                            // query heads that share a head of K and V
  int head_tiles;                                       // row tiles of 64 rows, of these
  int whole;                                            // items that are all of a head: the first ones
  int item_tiles;                                       // row tiles of the others
  int items;
  Divisor by_head_items, by_kv_heads;  // items of a head that is cut, heads of K and V in a batch element or sequence
  Divisor by_row_tiles;                // row tiles of a query head
  Divisor by_group;                    // of a ragged batch, all whose heads are cut
};

}  // namespace fp8cutlass
