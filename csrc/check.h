// Errors of the binding. The Python package validates with names and remedies; what fails here is an invariant.
//
// No streams: the library may have been linked with a libstdc++ of its own, and that one's locales and those of the
// libstdc++ in the process take each other's place, which ends in a wrong address.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace fp8cutlass {

template <typename Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    text += digits;
  } else if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else {
    text += part;
  }
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message = "fp8cutlass: ";
  (append(message, parts), ...);
  throw std::runtime_error(message);
}

// The parts are evaluated on every call: texts that cost something belong into an `if` with `fail`.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

}  // namespace fp8cutlass
