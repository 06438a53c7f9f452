// Long chunks of queries over a cache in pages, by the kernels of ragged batches: one kernel chooses the sequences, one
// copies their keys, then come the plan and attention. Nobody waits for the lengths.
#pragma once

#include <optional>

#include "decode.h"
#include "pages.h"
#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

struct PrefillArguments {
  View q;  // (T, H, D) bf16 or fp16, D the variant's head_dim; 16-byte aligned rows
  PagedViews pages;
  View lengths;              // (sequences,) int32
  std::optional<View> cu_q;  // (sequences + 1,) int32; none: all have as many queries
  View out;                  // (T, H, D), the rows of the sequences that are chosen are written
  std::optional<View> lse;   // (H, T), likewise
  View rest;                 // (sequences,) int32, is written: the lengths for kernels of decode, which are `routed`
  double score_amax;         // what the largest |q| of a row becomes
  int64_t least;             // queries of a sequence that is chosen
  int64_t most, capacity;    // sequences that are chosen at most, and keys of all of them
};

// Launches on the current stream. Throws std::runtime_error naming the argument.
void prefill_pages(const VariantEntry& variant, const DecodeNumbers& numbers, const PrefillArguments& arguments);

}  // namespace fp8cutlass
