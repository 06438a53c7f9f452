// Counters for kernels whose CTAs draw their next work item: which two words of device memory a launch may use.
#pragma once

#include <cuda_runtime_api.h>

namespace fp8cutlass {

// Two zeroed words that no other launch can be using at the same time; a kernel leaves them zero. Launches on one
// stream run one after the other and share a pair. So do the launches that one capture of a stream records; that pair
// is never given to anything else, as the graph may be replayed beside whatever else runs. (A capture that is
// instantiated twice must not run beside itself; torch instantiates once.) Null when there is none left (thousands of
// captures, hundreds of streams) or no memory: the kernel then shares the items out beforehand. Safe to call from
// several threads; `device` must be current.
unsigned* work_counters(int device, cudaStream_t stream);

}  // namespace fp8cutlass
