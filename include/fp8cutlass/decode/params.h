// What a decode kernel is launched with: attention of few queries over long caches that are read where they lie.
// Plain C++ without CUDA or torch headers, so that host code and host tests can include it.
#pragma once

#include <cstdint>

namespace fp8cutlass::decode {

// A cache of K or V in e4m3: where the bytes of a token and head begin. Strides are in bytes. The bytes of a head are
// contiguous and begin at a multiple of 16.
struct Cache {
  const uint8_t* base;
  int64_t page, token, head;
};

// Where each token, or page, and head has a descale of its own, float32, four-byte aligned. Strides are in bytes. Null:
// none.
struct TokenDescale {
  const uint8_t* base;
  int64_t page, token, head;
};

// Float32 descales that a sequence and head have: steps of 0 where they share one. Kernels limit them to 2^-126 to
// 2^126. Null: `value` is that of all.
struct HeadDescale {
  const float* base;
  int sequence, head;
  float value;
};

// Divides what is not negative, without a division.
struct Divisor {
  int by;
  unsigned factor;  // 2^shift / by, rounded up
  int shift;        // 31, and the bits of `by`
};

inline Divisor divisor(int by) {
  int bits = 0;
  while ((int64_t{1} << bits) < by) ++bits;
  return {by, unsigned(((uint64_t{1} << (31 + bits)) + unsigned(by) - 1) / unsigned(by)), 31 + bits};
}

// The lengths of a batch, which only the device knows. A token that lies outside of all tensors is never read,
// whatever they say (units.h).
struct Batch {
  const int* lengths;  // (sequences,) keys in the cache
  const int* cu_q;     // (sequences + 1,) where the queries of each begin, and those of the last end; null: `each` has
  int total_q;         // queries of all sequences
  int sequences;
  int most_keys;  // that a row of the page table has room for
  int heads, kv_heads;
  Divisor by_group, by_kv_heads;  // heads that share one of K and V; those of K and V
  int left, right;                // of its own position, the keys before and after that a query sees; kFar: all
  int each;                       // where cu_q is null, queries of every sequence
  int routed;                     // a sequence of negative length has no queries here: they are another kernel's
};

struct Sequence {
  int query, queries, keys;  // the first query, how many; keys in the cache
};

// Work is cut at a unit, a tile of its keys. Where that tile is not the first, the CTAs from `first` to `last` share
// the unit: `first` begins it. A CTA works until the cut of the next one. Or, where `step` is not 0, on a unit in every
// `step` sequences.
struct alignas(16) Cut {
  int sequence, unit, tile, first, last;
  Sequence of;
  int begin, end;  // of the queries that belong to a sequence
  int step;
  int unused;
};
static_assert(sizeof(Cut) == 48);

// Of the kernel that cuts the work (cut.cuh).
struct CutParams {
  Batch batch;
  int rows, tile;     // of the decode kernel: rows of a unit, keys of a tile
  int ctas;           // that share the work
  int overhead;       // what a unit costs beside its tiles, in tiles
  int whole;          // 1: no unit is shared, so that results do not depend on the other sequences
  Cut* cuts;          // (ctas + 1,)
  unsigned* arrived;  // (ctas, kArrivals) is zeroed here
};

enum Sink : int { kSinkFp32, kSinkBf16, kSinkFp16 };

// A cache in pages, with its descales.
struct Paged {
  Cache k, v;
  TokenDescale k_token, v_token;
  HeadDescale k_descale, v_descale;
  const int* page_table;  // (sequences, most_keys / page_size); null: page s is that of sequence s
  int64_t table_row;
  Divisor by_page_size;  // tokens of a page
  int entries, pages;    // pages of a row of the table, and of the cache
};

struct DecodeParams : Paged {
  Batch batch;
  const void* q;  // (total_q, H, D) bf16 or fp16, strides in elements, rows 8-byte aligned
  int64_t q_row, q_head;
  int q_bf16;         // else fp16; of the output as well
  const void* sinks;  // (H,) or (H, total_q): a score that joins the sum of a row; null: none
  int64_t sink_head, sink_token;
  int sink_type;  // Sink
  float scale;    // softmax scale
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
  void* o;        // (total_q, H, D), strides in elements, rows 16-byte aligned
  int64_t o_row, o_head;
  float* lse;  // (H, total_q) natural logarithm, or null
  int ctas;
  const Cut* cuts;
  unsigned* arrived;  // zero, left zero
  float* parts;       // for each CTA two results of units that it shares
};

constexpr int kCutThreads = 512;                                     // of the one CTA that cuts the work
constexpr int kCutBytes = 8 * (2 * kCutThreads + kCutThreads / 32);  // of its shared memory
constexpr int kArrivals = 8;                                         // warps of a CTA that end a share, at most
constexpr int kKnown = 32;                                           // sequences whose lengths a CTA keeps
constexpr int kFar = 1 << 30;                                        // a window's end that no length reaches

}  // namespace fp8cutlass::decode
