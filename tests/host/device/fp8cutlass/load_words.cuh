// What include/fp8cutlass/load_words.cuh does on a card. Where nothing may be read, the CTA stops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace fp8cutlass {

template <class Word>
Word loaded(const void* pointer) {
  const auto* const from = static_cast<const uint8_t*>(pointer);
  if (!device::may_read(from, sizeof(Word))) device::stop("a load reads outside of the tensors");
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Word) != 0) device::stop("a load is not aligned");
  Word word;
  std::memcpy(&word, from, sizeof(Word));
  return word;
}
inline uint32_t load_word(const void* pointer) { return loaded<uint32_t>(pointer); }
inline uint32_t load_half_word(const void* pointer) { return loaded<uint16_t>(pointer); }

}  // namespace fp8cutlass
