// What the kernel that appends tokens to a paged cache is launched with. Plain C++ without CUDA or torch headers, so
// that host code and host tests can include it.
#pragma once

#include <cstdint>

namespace fp8cutlass::appending {

enum Type : int { kBf16, kFp16, kFp32, kE4m3 };

// (tokens, heads, D): strides in bytes, rows begin on multiples of 16.
struct Rows {
  const uint8_t* base;
  int64_t token, head;
};

// (tokens,) int32 or int64; base null: none.
struct Numbers {
  const void* base;
  int wide;
};

// K or V of the cache, e4m3: where the bytes of a token and head begin. Strides are in bytes, multiples of 16.
struct Store {
  uint8_t* base;
  int64_t page, token, head;
};

// Float32 descales in the pages, strides in bytes; base null: none.
struct PageDescale {
  uint8_t* base;
  int64_t page, token, head;
};

// Float32 descales that are given, strides in elements: a row for each token of a list of slots, or for each sequence
// of a page table. Base null: they are found here.
struct GivenDescale {
  const float* base;
  int64_t row, head;
};

// Cosines or sines, (table_rows, half): strides in bytes, rows begin on multiples of 16. Never e4m3.
struct Angles {
  const uint8_t* base;
  int64_t row;
};

struct AppendParams {
  Rows k, v;
  int type;          // of both
  int tokens;        // of the batch
  int first, count;  // those whose rows this launch writes
  int heads, head_dim;
  int lane_bits;  // 2^lane_bits lanes of 16 columns share a row
  int row_ctas;   // CTAs that write rows; the others write V of pages, one a token and head
  int pages, page_size;

  // Where tokens go: a list of slots, or what follows it.
  Numbers slots;       // page * page_size + position in the page; out of range: nowhere
  Numbers positions;   // in their sequences, read for the turn alone
  const int* cu;       // (sequences + 1,) where each sequence's tokens begin
  const int* lengths;  // (sequences,) keys that are in the pages already
  const int* table;    // (sequences, entries)
  int64_t table_row;
  int sequences, entries;
  int width;  // threads that look through the pages of a sequence together, a power of two
  int* used;  // (sequences,) is written: lengths with the new tokens; or null

  // What becomes of K before it is quantised.
  Angles cos, sin;
  int angle_type, table_rows;
  int half;  // columns turned are twice as many, a multiple of 8; 0: none
  int interleaved;
  const float* mean;  // (heads, D), rows begin on multiples of 16 bytes; or null
  int64_t mean_head;
  int rotated;  // columns that are rotated together, a power of two; 0: none
  float rotation_scale;

  Store k_store, v_store;
  PageDescale k_token, v_page;        // v_page has no step from token to token
  GivenDescale k_descale, v_descale;  // K's is found where k_token is there; V's grows where none is given
};

constexpr int kAppendThreads = 256;
constexpr int kColumns = 16;                     // of a lane
constexpr int kMostHeadDim = 256;                // sixteen lanes
constexpr int kMostTokens = kAppendThreads + 1;  // of the rows of a CTA
constexpr int kAppendBytes = 5168;  // of its shared memory; where V grows, four more for each token of a page

}  // namespace fp8cutlass::appending
