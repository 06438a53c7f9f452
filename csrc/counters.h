// Counters for kernels whose CTAs draw their next work item: which words of device memory a launch may use.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace fp8cutlass {

constexpr int kReadyHeads = 2048;

struct WorkCounters {
  unsigned* words = nullptr;       // kAttentionCounters, of launches of an attention kernel
  unsigned* handover = nullptr;    // kCounters, of pairs of launches that hand over
  unsigned* ready = nullptr;       // kReadyHeads, of these pairs; asked for separately, as there are fewer of them
  std::mutex* in_pairs = nullptr;  // held round both launches of a pair, so that another thread's pair comes after it
};

// Zeroed words that no other launch can be using at the same time; the kernels leave them zero. Launches on one stream
// run one after the other and share them. So do the launches that one capture of a stream records; those are never
// given to anything else, as the graph may be replayed beside whatever else runs. (A capture that is instantiated twice
// must not run beside itself; torch instantiates once.) Null when there are none left (thousands of captures, hundreds
// of streams; `ready` hundreds of captures, a hundred streams) or no memory: items are then shared out beforehand, and
// nothing is handed over. Safe to call from several threads; `device` must be current.
WorkCounters work_counters(int device, cudaStream_t stream, bool with_ready);

}  // namespace fp8cutlass
