#include "tensors.h"

#include <algorithm>
#include <limits>

#include "check.h"

namespace fp8cutlass {

namespace {

bool has_shape(const View& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : shape) {
    if (tensor.size(dim++) != size) return false;
  }
  return true;
}

int64_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 4;
  }
}

}  // namespace

View::View(const torch::stable::Tensor& tensor)
    : data_(tensor.data_ptr()),
      dim_(tensor.dim()),
      element_size_(static_cast<int64_t>(tensor.element_size())),
      device_(tensor.get_device_index()),
      type_(tensor.scalar_type()),
      cuda_(tensor.is_cuda()) {
  require(dim_ <= kMaxDim, "a tensor of ", dim_, " dimensions was given");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::copy(sizes.begin(), sizes.end(), size_.begin());
  std::copy(strides.begin(), strides.end(), stride_.begin());
}

View::View(void* data, ScalarType type, int64_t device, std::initializer_list<int64_t> sizes)
    : data_(data),
      dim_(static_cast<int64_t>(sizes.size())),
      element_size_(element_bytes(type)),
      device_(device),
      type_(type),
      cuda_(true) {
  std::copy(sizes.begin(), sizes.end(), size_.begin());
  for (int64_t dim = dim_, step = 1; dim-- > 0; step *= size_[dim]) stride_[dim] = step;
}

View View::permuted(std::initializer_list<int> order) const {
  View view = *this;
  view.dim_ = 0;
  for (const int from : order) {
    view.size_[view.dim_] = from == kNew ? 1 : size_[from];
    view.stride_[view.dim_++] = from == kNew ? 0 : stride_[from];
  }
  return view;
}

View View::joined(const char* name) const {
  const bool steady = size_[0] == 1 || size_[1] == 1 || stride_[0] == size_[1] * stride_[1];
  require(steady, name, " must have one stride over its first two dimensions");
  View view = *this;
  view.size_[0] = size_[0] * size_[1];
  view.stride_[0] = size_[1] == 1 ? stride_[0] : stride_[1];
  std::copy(size_.begin() + 2, size_.end(), view.size_.begin() + 1);
  std::copy(stride_.begin() + 2, stride_.end(), view.stride_.begin() + 1);
  --view.dim_;
  return view;
}

View View::as_bytes(const char* name) const {
  const bool fp8 = type_ == ScalarType::Float8_e4m3fn || type_ == ScalarType::Float8_e5m2;
  require(fp8 || type_ == ScalarType::Byte, name, " must be FP8, or a uint8 view of it");
  View view = *this;
  view.type_ = ScalarType::Byte;
  return view;
}

int64_t View::numel() const {
  int64_t product = 1;
  for (int64_t dim = 0; dim < dim_; ++dim) product *= size_[dim];
  return product;
}

bool View::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t step = 1;
  for (int64_t dim = dim_; dim-- > 0; step *= size_[dim]) {
    if (size_[dim] != 1 && stride_[dim] != step) return false;
  }
  return true;
}

constexpr int64_t kGroups = 4;  // of a block

int64_t descale_count(Granularity shared_by, int64_t batch_heads, int64_t tokens, int64_t key_block, int64_t head_dim) {
  switch (shared_by) {
    case Granularity::tensor:
      return 1;
    case Granularity::head:
      return batch_heads;
    case Granularity::block:
      return batch_heads * ((tokens + key_block - 1) / key_block);
    case Granularity::group:
      return batch_heads * kGroups * ((tokens + key_block - 1) / key_block);
    case Granularity::token:
      return batch_heads * tokens;
    default:
      return batch_heads * head_dim;
  }
}

std::string shape_text(const View& tensor) {
  std::string text = "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (dim > 0) text += ", ";
    append(text, tensor.size(dim));
  }
  return text + ")";
}

void require_shape(const View& tensor, const char* name, std::initializer_list<int64_t> shape) {
  if (has_shape(tensor, shape)) return;
  std::string expected;
  for (const int64_t size : shape) {
    if (!expected.empty()) expected += ", ";
    append(expected, size);
  }
  fail(name, " has shape ", shape_text(tensor), ", expected (", expected, ")");
}

void require_same_device(const View& tensor, const char* name, const View& q) {
  require(tensor.is_cuda() == q.is_cuda() && tensor.device() == q.device(), name, " is not on the device of q");
}

void require_aligned(const void* pointer, const char* name) {
  require(reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0, name, " does not start on a multiple of ", kAlignment,
          " bytes");
}

float fp8_limit(double amax, const char* name) {
  require(amax >= 1 && amax <= 448, name, " must lie in [1, 448], got ", amax);
  return static_cast<float>(amax);
}

int to_int(int64_t value, const char* name) {
  require(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(), name, " is ", value,
          ", outside of a 32-bit integer");
  return static_cast<int>(value);
}

Strides row_strides(const View& tensor, const char* name, bool writable) {
  require(tensor.stride(3) == 1, name, " must be contiguous in its last dimension, got stride ", tensor.stride(3));
  const int64_t bytes = tensor.element_size();
  int64_t stride[3];
  for (int dim = 0; dim < 3; ++dim) {
    stride[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
    require(stride[dim] * bytes % kAlignment == 0, name, " has stride ", stride[dim], " in dimension ", dim,
            ", which is no multiple of ", kAlignment, " bytes");
    require(!writable || tensor.size(dim) == 1 || stride[dim] > 0, name, " is expanded in dimension ", dim);
  }
  return {stride[0], stride[1], stride[2]};
}

void* dense_pointer(const View& tensor, const char* name, const View& q, ScalarType type, const char* type_name) {
  require(tensor.scalar_type() == type, name, " must be ", type_name);
  require(tensor.is_contiguous(), name, " must be contiguous");
  require_same_device(tensor, name, q);
  return tensor.data();
}

float* float_pointer(const View& tensor, const char* name, const View& q) {
  return static_cast<float*>(dense_pointer(tensor, name, q, ScalarType::Float, "float32"));
}

}  // namespace fp8cutlass
