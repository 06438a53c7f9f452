// What operators of the extension that allocate have in common: the result, and one workspace for everything else.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>

#include "registry.h"
#include "tensors.h"

namespace fp8cutlass {

using torch::stable::Tensor;

// Memory on q's card. Throws std::runtime_error where there is none.
template <size_t kDim>
Tensor empty(const View& q, int32_t type, const std::array<int64_t, kDim>& sizes,
             const std::array<int64_t, kDim>& strides);

// The result of a kernel on q (B, H, Sq, D): (B, H, Sq, head_dim), dense, in memory in that order or in (B, Sq, H,
// head_dim).
Tensor empty_result(const View& q, bool seq_major, const VariantEntry& variant);

// Of torch: of a kernel's result, and of bytes.
int32_t type_of(OutType out);
int32_t byte_type();

// What lies in one allocation, piece by piece.
class Layout {
 public:
  // Returns where a piece of so many bytes begins.
  int64_t add(int64_t bytes) {
    const int64_t begin = total_;
    total_ += (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    return begin;
  }
  int64_t total() const { return total_; }

 private:
  static constexpr int64_t kPieceAlignment = 256;  // tensor maps and bulk copies need 16
  int64_t total_ = 0;
};

// Whether the copy engine can fetch rows of x (B, H, S, D) as they lie: not where they are all the same, or further
// apart than a tensor map can say.
bool can_be_mapped(const View& x, const char* name);

}  // namespace fp8cutlass
