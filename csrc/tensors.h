// One tensor argument: what a launch takes from it, and checks, each of which names the argument in its error.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "fp8cutlass/params.h"

namespace fp8cutlass {

using torch::headeronly::ScalarType;

// Type, sizes and strides of a tensor and where its data lie, read once. It owns nothing. A piece of a workspace is a
// View without a tensor of its own.
class View {
 public:
  static constexpr int64_t kMaxDim = 5;

  View(const torch::stable::Tensor& tensor);  // NOLINT: implicit, so that operators pass tensors on as they are
  View(void* data, ScalarType type, int64_t device, std::initializer_list<int64_t> sizes);  // contiguous, on a card

  static constexpr int kNew = -1;                         // in `permuted`: a dimension of size 1 that there was not
  View permuted(std::initializer_list<int> order) const;  // its dimensions in another order
  View joined(const char* name) const;    // its first two dimensions as one; throws where strides do not allow it
  View as_bytes(const char* name) const;  // FP8 as uint8; throws where it is neither

  int64_t dim() const { return dim_; }
  int64_t size(int64_t dim) const { return size_[dim]; }
  int64_t stride(int64_t dim) const { return stride_[dim]; }
  int64_t numel() const;
  bool is_contiguous() const;
  ScalarType scalar_type() const { return type_; }
  int64_t element_size() const { return element_size_; }
  void* data() const { return data_; }
  bool is_cuda() const { return cuda_; }
  int64_t device() const { return device_; }

 private:
  void* data_;
  int64_t dim_, element_size_, device_;
  ScalarType type_;
  bool cuda_;
  std::array<int64_t, kMaxDim> size_{}, stride_{};
};

inline std::optional<View> view_of(const std::optional<torch::stable::Tensor>& x) {
  return x ? std::optional<View>(*x) : std::nullopt;
}

constexpr int64_t kKeyBlock = 128;  // V^T is padded to this many keys (`key_block` of the manifest)
constexpr int64_t kAlignment = 16;  // bytes of one vector access

inline int64_t padded_keys(int64_t keys) { return (keys + kKeyBlock - 1) / kKeyBlock * kKeyBlock; }

// Whether more than a block of a head shares a descale, so that its maximum takes a pass of its own.
inline bool beyond_blocks(Granularity shared_by) {
  return shared_by == Granularity::tensor || shared_by == Granularity::head || shared_by == Granularity::channel;
}

constexpr uint32_t kFlip = 0x80808080;  // turns the signs of four e4m3 bytes

// What the largest magnitude of a group becomes, as the kernels take it.
float fp8_limit(double amax, const char* name);

// Descales of an operand: of `tokens` of each of `batch_heads`, in blocks of `key_block`, with `head_dim` channels.
int64_t descale_count(Granularity shared_by, int64_t batch_heads, int64_t tokens, int64_t key_block, int64_t head_dim);

struct Strides {
  int64_t batch, head, row;
};

std::string shape_text(const View& tensor);
void require_shape(const View& tensor, const char* name, std::initializer_list<int64_t> shape);
void require_same_device(const View& tensor, const char* name, const View& q);
void require_aligned(const void* pointer, const char* name);
int to_int(int64_t value, const char* name);

// The first three strides in elements. A dimension of size 1 is never stepped along, so torch lets its stride be
// anything: it becomes 0. `writable` refuses strides of 0 on longer dimensions, where rows would overwrite one another.
Strides row_strides(const View& tensor, const char* name, bool writable);

// Contiguous data of one type on q's device; the shape is the caller's to check.
void* dense_pointer(const View& tensor, const char* name, const View& q, ScalarType type, const char* type_name);
float* float_pointer(const View& tensor, const char* name, const View& q);

}  // namespace fp8cutlass
