// What the kernels are launched with that bring long chunks of queries over a paged cache to the attention kernels of
// ragged batches. Plain C++ without CUDA or torch headers, so that host code and host tests can include it.
#pragma once

#include "fp8cutlass/decode/params.h"

namespace fp8cutlass::prefill {

// The sequences of a call whose queries the kernels of ragged batches take, as a ragged batch of their own, which only
// the device knows: a member is such a sequence. All int32 on the device.
struct Members {
  int* count;     // of members
  int* sequence;  // (most,) which sequence of the call each is
  int* first;     // (most,) keys before it are seen by no query
  int* cu_q;      // (most + 1,) the tokens of Q where each begins; behind the last member all tokens of Q
  int* used_q;    // (most,) how many queries each has; 0 behind the last member
  int* cu_k;      // (most + 1,) keys of the members before
  int most;
};

// Of the kernel that chooses members (route.cuh).
struct RouteParams {
  decode::Batch batch;
  int least;     // queries of a member
  int capacity;  // keys of all members, at most
  Members members;
  int* lengths;  // (sequences,) is written, for kernels of decode: keys, or -1 of a member
};

// Of the kernel that copies the members' keys (gather.cuh). Each member begins at a block of its own (walk/ragged.h).
struct GatherParams : decode::Paged {
  Members members;
  int* lengths;  // of a member that the kernels of ragged batches cannot take, the keys become its length again
  int kv_heads;
  int columns;                 // rows of K, and columns of packed V: whole blocks
  uint8_t* k_out;              // (Hkv, columns, head_dim)
  uint8_t* v_out;              // (Hkv, head_dim, columns), packed
  float *k_scales, *v_scales;  // (Hkv, columns / kBlock)
};

constexpr int kRouteThreads = 512;                             // of the one CTA that chooses members
constexpr int kRouteBytes = 8 * (kRouteThreads / 32) + 4 * 3;  // of its shared memory
constexpr int kBlock = 128;                                    // keys that share a descale
constexpr int kGatherCtas = 5;                                 // of an SM that copy keys

}  // namespace fp8cutlass::prefill
