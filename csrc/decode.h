// Attention of few queries over caches that are read where they lie: from tensors to the two launches, that of the
// kernel that cuts the work and that of the one that does it. Every invariant is checked that a wrong call could turn
// into a wrong address.
#pragma once

#include <optional>

#include "pages.h"
#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

// What both launches are about.
struct DecodeBatch {
  View lengths;  // (sequences,) int32
  View cu_q;     // (sequences + 1,) int32
  int64_t total_q, most_keys, heads, kv_heads;
  int64_t left, right;
  bool routed;  // sequences of negative length have no queries here
};

// The same for kernels.
decode::Batch batch_of(const DecodeBatch& batch);

struct DecodeWork {
  View cuts;     // (ctas + 1, 8) int32
  View arrived;  // (ctas,) int32
};

// Cuts the work of a batch for `entry`. Without `share`, no two CTAs work on a unit.
void cut_decode(const DecodeEntry& entry, const DecodeBatch& batch, const DecodeWork& work, int64_t overhead,
                bool share);

struct DecodeArguments {
  View q;  // (total_q, H, D) bf16 or fp16
  PagedViews pages;
  std::optional<View> sinks;  // (H,) or (H, total_q) float32
  View out;                   // (total_q, H, D)
  std::optional<View> lse;    // (H, total_q)
  View parts;                 // (ctas, 2, part_floats) float32
  double scale, softcap;
};

void run_decode(const DecodeEntry& entry, const DecodeBatch& batch, const DecodeWork& work, const DecodeArguments& a);

}  // namespace fp8cutlass
