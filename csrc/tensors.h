// Checks of one tensor argument, each of which names the argument in its error, and what a launch takes from it.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace fp8cutlass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kKeyBlock = 128;  // V^T is padded to this many keys (`key_block` of the manifest)
constexpr int64_t kAlignment = 16;  // bytes of one vector access

inline int64_t padded_keys(int64_t keys) { return (keys + kKeyBlock - 1) / kKeyBlock * kKeyBlock; }

struct Strides {
  int64_t batch, head, row;
};

std::string shape_text(const Tensor& tensor);
void require_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape);
void require_same_device(const Tensor& tensor, const char* name, const Tensor& q);
void require_aligned(const void* pointer, const char* name);
int to_int(int64_t value, const char* name);

// The first three strides in elements. A dimension of size 1 is never stepped along, so torch lets its stride be
// anything: it becomes 0. `writable` refuses strides of 0 on longer dimensions, where rows would overwrite one another.
Strides row_strides(const Tensor& tensor, const char* name, bool writable);

// Contiguous data of one type on q's device; the shape is the caller's to check.
void* dense_pointer(const Tensor& tensor, const char* name, const Tensor& q, ScalarType type, const char* type_name);
float* float_pointer(const Tensor& tensor, const char* name, const Tensor& q);

}  // namespace fp8cutlass
