#include "pages.h"

#include "check.h"

namespace fp8cutlass {

int* int_pointer(const View& tensor, const char* name, const View& like, std::initializer_list<int64_t> shape) {
  require_shape(tensor, name, shape);
  return static_cast<int*>(dense_pointer(tensor, name, like, ScalarType::Int, "int32"));
}

void check_cache(const View& tensor, const char* name, const View& q) {
  require(tensor.scalar_type() == ScalarType::Byte, name, " must be a uint8 view of FP8 data");
  require_same_device(tensor, name, q);
  require_aligned(tensor.data(), name);
  require(tensor.stride(3) == 1, name, " must be contiguous in its last dimension");
  for (int i = 0; i < 3; ++i)
    require(tensor.size(i) == 1 || (tensor.stride(i) >= 0 && tensor.stride(i) % kAlignment == 0), name,
            " must have strides of whole ", kAlignment, " bytes");
}

uint8_t* strided_floats(const View& tensor, const char* name, const View& q) {
  require(tensor.scalar_type() == ScalarType::Float, name, " must be float32");
  require_same_device(tensor, name, q);
  return static_cast<uint8_t*>(tensor.data());
}

}  // namespace fp8cutlass
