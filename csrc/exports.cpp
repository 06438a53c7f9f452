// What the extension holds, for ctypes and for tools that have no torch.
#include <string>

#include "kernels.h"

#define FP8CUTLASS_EXPORT extern "C" __attribute__((visibility("default")))

FP8CUTLASS_EXPORT int fp8cutlass_variant_count() { return fp8cutlass::kVariantCount; }

#define FP8CUTLASS_TEXT_OF(x) #x
#define FP8CUTLASS_TEXT(x) FP8CUTLASS_TEXT_OF(x)

// The namespace of torch.ops that the operators are in.
FP8CUTLASS_EXPORT const char* fp8cutlass_library() { return FP8CUTLASS_TEXT(FP8CUTLASS_LIBRARY); }

// SHA-256 of the manifest that the rows of the registry were generated with, in hex.
FP8CUTLASS_EXPORT const char* fp8cutlass_manifest() { return fp8cutlass::kManifest; }

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

// The same of decode.def.
FP8CUTLASS_EXPORT const char* fp8cutlass_decode_fields() {
#define X(type, name, meaning) #name " "
  return
#include "decode.def"
      ;
#undef X
}

// What a cubin calls a kernel (kernels.h), or null where there is none. Valid until the thread's next call.
FP8CUTLASS_EXPORT const char* fp8cutlass_kernel_name(int source, int form) {
  using namespace fp8cutlass;
  static thread_local std::string name;
  if (!has_kernel(source, form)) return nullptr;
  name = kernel_name(source, form);
  return name.c_str();
}
