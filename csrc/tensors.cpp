#include "tensors.h"

#include <limits>
#include <sstream>

#include "check.h"

namespace fp8cutlass {

namespace {

bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : shape) {
    if (tensor.size(dim++) != size) return false;
  }
  return true;
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text << (dim ? ", " : "") << tensor.size(dim);
  text << ")";
  return text.str();
}

void require_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  if (has_shape(tensor, shape)) return;
  std::ostringstream expected;
  const char* separator = "";
  for (const int64_t size : shape) {
    expected << separator << size;
    separator = ", ";
  }
  fail(name, " has shape ", shape_text(tensor), ", expected (", expected.str(), ")");
}

void require_same_device(const Tensor& tensor, const char* name, const Tensor& q) {
  require(tensor.is_cuda() == q.is_cuda() && tensor.get_device_index() == q.get_device_index(), name,
          " is not on the device of q");
}

void require_aligned(const void* pointer, const char* name) {
  require(reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0, name, " does not start on a multiple of ", kAlignment,
          " bytes");
}

int to_int(int64_t value, const char* name) {
  require(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(), name, " is ", value,
          ", outside of a 32-bit integer");
  return static_cast<int>(value);
}

Strides row_strides(const Tensor& tensor, const char* name, bool writable) {
  require(tensor.stride(3) == 1, name, " must be contiguous in its last dimension, got stride ", tensor.stride(3));
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  int64_t stride[3];
  for (int dim = 0; dim < 3; ++dim) {
    stride[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
    require(stride[dim] * bytes % kAlignment == 0, name, " has stride ", stride[dim], " in dimension ", dim,
            ", which is no multiple of ", kAlignment, " bytes");
    require(!writable || tensor.size(dim) == 1 || stride[dim] > 0, name, " is expanded in dimension ", dim);
  }
  return {stride[0], stride[1], stride[2]};
}

void* dense_pointer(const Tensor& tensor, const char* name, const Tensor& q, ScalarType type, const char* type_name) {
  require(tensor.scalar_type() == type, name, " must be ", type_name);
  require(tensor.is_contiguous(), name, " must be contiguous");
  require_same_device(tensor, name, q);
  return tensor.data_ptr();
}

float* float_pointer(const Tensor& tensor, const char* name, const Tensor& q) {
  return static_cast<float*>(dense_pointer(tensor, name, q, ScalarType::Float, "float32"));
}

}  // namespace fp8cutlass
