// Attention of few queries over caches that are read where they lie: from tensors to the two launches, that of the
// kernel that cuts the work and that of the one that does it. Work that was cut before is done by the second alone.
// Every invariant is checked that a wrong call could turn into a wrong address.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "fp8cutlass/decode/params.h"
#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

using torch::stable::Tensor;

// What calls of one form have in common, in the order of decode.def.
struct DecodeNumbers {
#define X(type, name, meaning) type name;
#include "decode.def"
#undef X
};

// Reads them: float64, contiguous, on the CPU. Throws std::runtime_error where they are not.
DecodeNumbers decode_numbers(const Tensor& numbers);

// What both launches are about.
struct DecodeBatch {
  View lengths;              // (sequences,) int32
  std::optional<View> cu_q;  // (sequences + 1,) int32; none: the queries are those of the sequences in equal parts
  int64_t total_q, most_keys, heads, kv_heads;
};

// The same for kernels.
decode::Batch batch_of(const DecodeBatch& batch, const DecodeNumbers& numbers);

// (tokens, H, D) of q and of what has its shape.
View rows_of(const View& x, const char* name);

// Cuts the work of a batch for `entry` into `work`, bytes on the card: the cuts, the counters of arrivals, and room for
// the parts of units that CTAs share.
void cut_decode(const DecodeEntry& entry, const DecodeNumbers& numbers, const DecodeBatch& batch, const View& work);

struct DecodeTensors {
  const Tensor& q;  // (total_q, H, D), or (B, S, H, D), bf16 or fp16
  const Tensor& k;  // (pages, page_size, Hkv, D) FP8 or uint8, any strides of whole 16 bytes
  const Tensor& v;
  const std::optional<Tensor>& page_table;  // (sequences, entries) int32; none: a page for each sequence
  const Tensor& lengths;                    // (sequences,) int32
  const std::optional<Tensor>& cu_q;        // as in DecodeBatch
  const std::optional<Tensor>& k_descale;   // (1,), (Hkv,) or (sequences, Hkv) float32, any strides
  const std::optional<Tensor>& v_descale;   // none: the numbers have it
  const std::optional<Tensor>& k_token;     // (pages, page_size, Hkv) float32, any strides
  const std::optional<Tensor>& v_page;      // (pages, Hkv) float32, any strides
  const std::optional<Tensor>& sinks;       // (H,) float32, bf16 or fp16, or (H, total_q) float32
  const std::optional<Tensor>& work;        // that was cut for this batch; none: it is cut here
  const std::optional<Tensor>& out;         // as q; none: it is made here
  const std::optional<Tensor>& lse;         // (H, total_q) float32
};

// Launches on the current stream. Returns the result in the shape of q, contiguous; nothing where there is `out`.
Tensor run_decode(const DecodeEntry& entry, const DecodeNumbers& numbers, const DecodeTensors& tensors);

}  // namespace fp8cutlass
