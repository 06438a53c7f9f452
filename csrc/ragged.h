// A ragged batch: from torch tensors to the launch ABI, with every invariant checked that the host can know. What the
// lengths on the device say is clamped by the plan.
#pragma once

#include <cstdint>
#include <optional>

#include "arguments.h"
#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

struct RaggedLengths {
  View cu_q, cu_k;                     // (sequences + 1,) int32
  std::optional<View> used_q, used_k;  // (sequences,) int32
};

// One call as the operator receives it. FP8 tensors arrive as uint8 views. T and Tk are the tokens of all sequences.
struct RaggedArguments {
  View q;  // (T, H, D); with `source` bf16 or fp16, and D may be less than the kernel's, a multiple of 8
  View k;  // (Tk, Hkv, D); with `keys_in_blocks` (blocks * key_block, Hkv, D), laid out as v
  View v;  // (Hkv, D, blocks * key_block), packed: each sequence begins at the block of walk/ragged.h
  // float32: (1,), or (sequences, heads) shared by a sequence's tokens, or (1, heads, tokens) and (1, heads, blocks).
  std::optional<View> q_descale;  // absent exactly with `source`
  View k_descale, v_descale;
  RaggedLengths lengths;
  View plan;                // int32, of plan_words(): what the plan is written to
  View out;                 // (T, H, D)
  std::optional<View> lse;  // (H, T)
  double scale;
  int64_t window_left, window_right;  // keys before and after a row's own that it sees; of masks that have such ends
  bool bottom_right;                  // a sequence's last row sees its last key; else its first row its first
  bool keys_in_blocks;
  std::optional<QuerySource> source;
  std::optional<View> sinks;  // (H,): a logit of each head without a value
  double softcap = 0;         // a logit x becomes softcap * tanh(x / softcap), exactly with kernels that cap scores
};

// A mask's end, so far that adding it to any row or key number stays within 32 bits.
int window_end(int64_t keys);

// Where the lengths of a batch lie, and for how many sequences. They are on the card of `q`.
void set_lengths(RaggedBatch& batch, const RaggedLengths& lengths, const View& q);

// Words of the plan of such a batch.
int64_t plan_words(int64_t tokens, int64_t sequences, const VariantEntry& variant);

// Parameters of a launch of `variant`, all but `sm_count` and `counters`. Throws std::runtime_error naming the
// argument.
ForwardParams ragged_params(const RaggedArguments& arguments, const VariantEntry& variant);

}  // namespace fp8cutlass
