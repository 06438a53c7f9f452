// Errors of the binding. The Python package validates with names and remedies; what fails here is an invariant.
#pragma once

#include <sstream>
#include <stdexcept>

namespace fp8cutlass {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "fp8cutlass: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The parts are evaluated on every call: texts that cost something belong into an `if` with `fail`.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

}  // namespace fp8cutlass
