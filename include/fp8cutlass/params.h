// The launch ABI: what one kernel launch needs.
// Plain C++ without CUDA or torch headers, so that host code and host tests can include it.
#pragma once

#include <cstdint>

namespace fp8cutlass {

// Where a diagnostic variant writes its intermediate values; unused by forward variants.
// All are row-major and contiguous, with tiles = ceil(seqlen_k / tile_n) and keys = tiles * tile_n.
struct DiagnosticOutputs {
  float* scores;  // (B, H, Sq, keys) raw dot products after masking, before the scale
  uint8_t* p;     // (B, H, Sq, keys) the e4m3 bytes of P
  float* weight;  // (B, H, Sq, tiles) log2 weight of each tile
  float* tile_o;  // (B, H, tiles, Sq, D) P V of each tile before promotion
};

// Words of ForwardParams::counters: of kernels that draw, and with those of the kernel that hands over to them.
constexpr int kAttentionCounters = 2, kCounters = 4;

// Q as a kernel is given it. Some kernels of the sm90a family quantise 16-bit rows themselves, each with its own scale.
enum class QueryType { fp8, bf16, fp16 };

struct QueryScaling {
  QueryType type;
  int columns;             // of a row, a multiple of 8, at most the kernel's head_dim; the rest counts as zeros
  float limit;             // what the largest |q| of a row becomes; of FP8 0 where rows are not lowered
  float limit_reciprocal;  // 1 / limit, rounded once
  bool early;              // no kernel before this one in the stream, that has not ended, writes Q
  uint32_t flip;           // XORed onto four e4m3 bytes: 0x80808080 turns their signs
};

// A tile of rows of one sequence of a ragged batch, as the plan lists it.
struct alignas(16) RowTile {
  int sequence;
  int row;         // its first row, in the sequence
  int rows, keys;  // of the sequence
  int query, key;  // the tokens of Q and K where the sequence begins
  int block;       // of packed V and of block descales, where the sequence begins
  int unused;
};

// A ragged batch: (tokens, heads, D), the sequences one after the other. All null and zero where sequences are alike.
// batch is then 1, seqlen_q and seqlen_k are all tokens, seqlen_k_padded is the length of packed V.
struct RaggedBatch {
  RowTile* tiles;              // on the device, of all sequences, those with most keys first: what the plan makes
  int* count;                  // of them, on the device
  int most;                    // the host's upper bound of it
  const int *cu_q, *cu_k;      // (sequences + 1,) on the device: where each sequence's tokens of Q and of K begin
  const int *used_q, *used_k;  // (sequences,) on the device: how many of them count; or null: all
  int sequences;
  int key_tokens;      // of K, as cu_k counts them
  int keys_in_blocks;  // K lies as packed V does: a sequence begins at its block
  int bottom_right;    // the mask's offsets count from the last row's last key, not from the first row's first
  // Steps from sequence to sequence in descales that a sequence's rows and blocks share; else 0.
  int q_descale_sequence, k_descale_sequence, v_descale_sequence;
  int early;  // no kernel before this one in the stream, that has not ended, writes lengths
};

// One attention forward. Q, K and V are FP8, one byte an element, but for Q where `query` says otherwise.
struct ForwardParams {
  const uint8_t* q;  // (B, H, Sq, D), strides in bytes, last dimension contiguous, 16-byte aligned rows
  const uint8_t* k;  // (B, Hkv, Sk, D), likewise
  const uint8_t* v;  // packed V^T: (B, Hkv, D, seqlen_k_padded), contiguous, see docs/design/numerics.md
  int64_t q_stride_batch, q_stride_head, q_stride_row;
  int64_t k_stride_batch, k_stride_head, k_stride_row;
  const float* q_descale;  // canonical shapes of the scaling mode, contiguous; of Q null where `query` is no FP8
  const float* k_descale;  // token mode: (B, Hkv, seqlen_k_padded)
  const float* v_descale;
  // Steps from head to head (B * heads in a row) and from row or block to the next in the descales, 0 where they share
  // one.
  int q_descale_head, q_descale_row, k_descale_head, k_descale_block, v_descale_head, v_descale_block;
  const float* out_descale;  // (1,), e4m3 output only: stored = o / out_descale
  void* o;                   // (B, H, Sq, D), strides in elements, last dimension contiguous, 16-byte aligned rows
  int64_t o_stride_batch, o_stride_head, o_stride_row;
  float* lse;   // (B, H, Sq) contiguous natural-log sum of exponentials, or null
  float* amax;  // (1,) running maximum of |o| before the output scale, or null; the caller zeroes it
  int batch, heads, kv_heads, seqlen_q, seqlen_k, seqlen_k_padded;
  int causal_offset;  // key j is visible to row i when j <= i + causal_offset; read where the mask has a diagonal
  float scale;        // softmax scale, >= 0; over the cap, of kernels that cap scores
  int sm_count;       // multiprocessors of the device: sizes the persistent grid
  int item_rows;  // of kernels for windows, set by the launch: rows of an item, tile_m of one head or half as many of
                  // two
  unsigned* counters;  // zeroed words, left zeroed, from which the CTAs of kernels that draw take work items; or null
  DiagnosticOutputs diag;
  QueryScaling query;
  // Where the kernel before in the stream hands over K and V head by head: how many of the ready_blocks blocks of each
  // (B * Hkv) it has written; zeroed, left zeroed, and there are `counters`, and Q is early. Null: operands are there
  // when that kernel has ended.
  unsigned* ready;
  int ready_blocks;
  int window_offset;  // key j is visible to row i when j >= i + window_offset; read where the mask is a window
  int merge_lse;      // the LSE is that of the quantised P, whose sums are there anyway
  RaggedBatch ragged;
  const float* sinks;  // (H,) logits without a value, which join the sum of a row's exponentials once; or null
  // Of kernels that cap scores: the cap in octaves. `scale` is then what the tanh takes a product times.
  float cap;
};

enum class OutType { bf16, fp16, e4m3 };
// What shares one descale; group: of each 8 tokens of a block two neighbours.
enum class Granularity { tensor, head, block, token, channel, group };

}  // namespace fp8cutlass
