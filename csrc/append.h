// Appending tokens to the pages of a cache: from tensors to the launch. Every invariant is checked that a wrong call
// could turn into a wrong address.
#pragma once

#include <optional>

#include "tensors.h"

namespace fp8cutlass {

struct AppendArguments {
  View k, v;                               // (T, Hkv, D) bf16, fp16, float32, or uint8: the bytes of e4m3
  View k_cache, v_cache;                   // (pages, page_size, Hkv, D) uint8, any strides of whole 16 bytes
  std::optional<View> k_token;             // (pages, page_size, Hkv) float32, any strides; K's descales are found
  std::optional<View> v_page;              // (pages, Hkv) float32, any strides
  std::optional<View> k_descale;           // (Hkv,) or (rows, Hkv) float32: rows are T, or with a table sequences
  std::optional<View> v_descale;           // absent: V's in the pages grow
  std::optional<View> slots, positions;    // (T,) int32 or int64
  std::optional<View> cu, lengths, table;  // without slots: (sequences + 1,), (sequences,), (sequences, entries) int32
  std::optional<View> used;                // (sequences,) int32, is written: the lengths with the new tokens
  std::optional<View> cos, sin;            // (S, R / 2) bf16, fp16 or float32, contiguous
  bool interleaved;
  std::optional<View> k_mean;  // (Hkv, D) float32
  bool hadamard;
};

void append_tokens(const AppendArguments& a);

}  // namespace fp8cutlass
