// How a function is declared that the host calls as well as kernels. (CUTE_HOST_DEVICE is the same, but its header
// takes 0.4 s to compile.)
#pragma once

#ifdef __CUDACC__
#define FP8_HOST_DEVICE __forceinline__ __host__ __device__
#else
#define FP8_HOST_DEVICE inline
#endif
