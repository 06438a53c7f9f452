// What the extension holds, for ctypes and for tools that have no torch.
#include "fp8cutlass/params.h"

#define FP8CUTLASS_EXPORT extern "C" __attribute__((visibility("default")))

FP8CUTLASS_EXPORT int fp8cutlass_variant_count() { return fp8cutlass::kVariantCount; }

// The id of a variant, or null where there is no such number.
FP8CUTLASS_EXPORT const char* fp8cutlass_variant_id(int variant) {
  const bool known = variant >= 0 && variant < fp8cutlass::kVariantCount;
  return known ? fp8cutlass::kVariants[variant].id : nullptr;
}

// The names of call.def, each followed by a space: Python fills in the numbers of a call by name.
FP8CUTLASS_EXPORT const char* fp8cutlass_call_fields() {
#define X(type, name, meaning) #name " "
  return
#include "call.def"
      ;
#undef X
}
