// Dispatch: which variant serves a problem, read from the generated table. No CUDA and no torch, so that it runs
// anywhere.
#pragma once

#include <climits>

namespace fp8cutlass {

// A problem as dispatch sees it. `arch`, `dtype`, `out`, `scaling` and `precision` are positions on the axes of
// dispatch.json; the rest are plain values.
struct Problem {
  int arch;
  int head_dim;   // elements, one of the table's head dims
  int seqlen_k;   // KV length in keys, >= 0
  int dtype;      // of Q, K and V
  int out;        // of the output
  int scaling;    // scaling mode
  int causal;     // 0 or 1
  int precision;  // what the caller asks for
  int batch, heads, seqlen_q, sm_count;
};

// What lookup answers for a problem that is no point of the table; a legal point without a kernel is any other
// negative number.
constexpr int kNotInTable = INT_MIN;

// Returns the variant's number in the registry (>= 0), a negative cell where no kernel is legal, or kNotInTable.
int lookup(const Problem& problem);

}  // namespace fp8cutlass
