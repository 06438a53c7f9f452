// What the kernel that merges two partial results gets (csrc/merge.cpp). Plain C++ without CUDA or torch.
#pragma once

#include <cstdint>

namespace fp8cutlass::merging {

constexpr int kMergeThreads = 256;
constexpr int kColumns = 4;  // that a thread has at a time

enum class Partial { f32, bf16, fp16 };

// Rows are numbered over three dimensions, the last one fastest. Strides are in elements, those of O multiples of
// kColumns.
struct MergeParams {
  float* out;      // the first result, and what both are merged to
  float* lse;      // of it
  const void* to;  // the second result, whose elements are of `kind`
  const float* to_lse;
  int64_t out_stride[3], lse_stride[3], to_stride[3], to_lse_stride[3];
  unsigned rows;     // in all
  unsigned size[2];  // of the last two dimensions
  unsigned columns;  // a multiple of kColumns
  unsigned lanes;    // a row, a power of two up to 32, so that a warp has whole rows
  Partial kind;
};

}  // namespace fp8cutlass::merging
