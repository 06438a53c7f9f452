// The numbers that operators take as one tensor, as every argument costs the host a fifth of a microsecond on its way
// through torch. A `.def` file lists those of an operator: their types, names and order.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "check.h"
#include "tensors.h"

namespace fp8cutlass {

// A number as its type; an integer must be one.
template <class T>
T number_as(double number, const char* name) {
  if constexpr (std::is_same_v<T, int64_t>) {
    constexpr double kExact = int64_t{1} << 53;
    require(number >= -kExact && number <= kExact && number == std::floor(number), name, " must be an integer, got ",
            number);
  }
  return static_cast<T>(number);
}

// The numbers themselves: float64, contiguous, on the CPU. Throws std::runtime_error where they are not.
inline const double* numbers_of(const torch::stable::Tensor& numbers, int64_t count) {
  const View view(numbers);
  require(numbers.is_cpu() && view.scalar_type() == ScalarType::Double && view.numel() == count && view.is_contiguous(),
          "constants must be ", count, " numbers of type float64, contiguous, on the CPU");
  return static_cast<const double*>(view.data());
}

}  // namespace fp8cutlass
