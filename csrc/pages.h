// Arguments that kernels which read or write a paged cache share.
#pragma once

#include <optional>

#include "fp8cutlass/decode/params.h"
#include "tensors.h"

namespace fp8cutlass {

// Contiguous int32 data of a shape, on the device of `like`.
int* int_pointer(const View& tensor, const char* name, const View& like, std::initializer_list<int64_t> shape);

// Bytes of float32 data on q's device, with any strides.
uint8_t* strided_floats(const View& tensor, const char* name, const View& q);

// Where something of a token and head lies in pages: strides in bytes.
struct Places {
  uint8_t* base;
  int64_t page, token, head;

  template <class T>
  T as() const {  // a struct of the same members
    return {base, page, token, head};
  }
};

// K and V of a cache (pages, page_size, Hkv, D).
struct CachePlaces {
  int64_t pages, page_size;
  Places k, v;
};

// Throws unless both are uint8 on the device of `like`, with a contiguous last dimension, and everything else begins at
// whole vectors.
CachePlaces cache_places(const View& k, const View& v, int64_t kv_heads, int64_t head_dim, const View& like);

// Descales in pages: of K (pages, page_size, Hkv), of V (pages, Hkv), whose tokens share them; float32, any strides.
Places token_descales(const View& k_token, const CachePlaces& cache, int64_t kv_heads, const View& like);
Places page_descales(const View& v_page, const CachePlaces& cache, int64_t kv_heads, const View& like);

// The rows of a page table (sequences, entries), int32, contiguous but for the steps between rows.
struct Table {
  const int* base;
  int64_t row, entries;
};

Table table_of(const View& table, int64_t sequences, const View& like);

// A cache that attention reads, as an operator receives it.
struct PagedViews {
  View k, v;                                 // (pages, page_size, Hkv, D) FP8 or uint8, any strides of whole 16 bytes
  std::optional<View> k_token;               // (pages, page_size, Hkv) float32, any strides
  std::optional<View> v_page;                // (pages, Hkv) float32, any strides
  std::optional<View> k_descale, v_descale;  // (1,), (Hkv,) or (sequences, Hkv) float32, any strides
  double k_value, v_value;                   // where there is none
  std::optional<View> page_table;            // (sequences, entries) int32; none: a page for each sequence
};

// The same for kernels.
decode::Paged paged_of(const PagedViews& views, int64_t sequences, int64_t head_dim, const View& like);

// Keys that a row of the table has room for.
inline int64_t room_of(const decode::Paged& p) { return int64_t{p.entries} * p.by_page_size.by; }

}  // namespace fp8cutlass
