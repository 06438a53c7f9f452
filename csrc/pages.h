// Arguments that kernels which read or write a paged cache share.
#pragma once

#include "tensors.h"

namespace fp8cutlass {

// Contiguous int32 data of a shape, on the device of `like`.
int* int_pointer(const View& tensor, const char* name, const View& like, std::initializer_list<int64_t> shape);

// Throws unless a cache of K or V (pages, page_size, Hkv, D) is uint8 on q's device, with a contiguous last dimension,
// and everything else begins at whole vectors.
void check_cache(const View& tensor, const char* name, const View& q);

// Bytes of float32 data on q's device, with any strides.
uint8_t* strided_floats(const View& tensor, const char* name, const View& q);

}  // namespace fp8cutlass
