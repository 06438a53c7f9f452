// Programs with one planted bug each, which shows with any argument; without one they are clean.
#pragma once

#include <cuda_runtime.h>

constexpr int kThreads = 64;

// 0 when the kernel ran; the tool's own exit status says what it saw.
inline int finish() { return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1; }
