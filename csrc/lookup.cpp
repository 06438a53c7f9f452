#include "lookup.h"

#include <cstdint>

#include "dispatch_table.inc"

namespace fp8cutlass {

namespace {

constexpr int kNone = -1;

int seqlen_bucket(int seqlen_k) {
  constexpr int kBounded = table::kShape[2] - 1;  // the last bucket has no upper bound
  for (int bucket = 0; bucket < kBounded; ++bucket) {
    if (seqlen_k <= table::kSeqlenBounds[bucket]) return bucket;
  }
  return kBounded;
}

int head_dim_position(int head_dim) {
  for (int position = 0; position < table::kShape[1]; ++position) {
    if (table::kHeadDims[position] == head_dim) return position;
  }
  return kNone;
}

// How many query tiles there are for each multiprocessor decides, and whether each is alone in its head.
int load_position(const Problem& problem) {
  const uint64_t heads = uint64_t(problem.batch) * problem.heads;
  const uint64_t tiles = (uint64_t(problem.seqlen_q) + table::kLoadRows - 1) / table::kLoadRows;
  // More than any bound asks for; kept small, as the product of three 31-bit numbers does not fit 64 bits.
  constexpr uint64_t kMany = uint64_t{1} << 40;
  const uint64_t items = tiles != 0 && heads >= kMany / tiles ? kMany : heads * tiles;
  int position = 0;
  for (const auto& [part, whole] : table::kLoadBounds) {
    if (items * whole <= uint64_t(problem.sm_count) * part) break;
    ++position;
  }
  constexpr int kShort = table::kShape[table::kAxes - 1] - 1;
  return position > 0 && problem.seqlen_q <= table::kLoadRows ? kShort : position;
}

}  // namespace

int lookup(const Problem& problem) {
  if (problem.seqlen_k < 0 || problem.batch < 0 || problem.heads < 0 || problem.seqlen_q < 0 || problem.sm_count < 0) {
    return kNotInTable;
  }
  const int position[table::kAxes] = {problem.arch,
                                      head_dim_position(problem.head_dim),
                                      seqlen_bucket(problem.seqlen_k),
                                      problem.dtype,
                                      problem.out,
                                      problem.scaling,
                                      problem.causal,
                                      problem.precision,
                                      load_position(problem)};
  int64_t cell = 0;
  for (int axis = 0; axis < table::kAxes; ++axis) {
    if (position[axis] < 0 || position[axis] >= table::kShape[axis]) return kNotInTable;
    cell = cell * table::kShape[axis] + position[axis];
  }
  return table::kCells[cell];
}

}  // namespace fp8cutlass

// For ctypes: the same, without a C++ type in the signature.
extern "C" __attribute__((visibility("default"))) int fp8cutlass_lookup(int arch, int head_dim, int seqlen_k, int dtype,
                                                                        int out, int scaling, int causal, int precision,
                                                                        int batch, int heads, int seqlen_q,
                                                                        int sm_count) {
  return fp8cutlass::lookup(
      {arch, head_dim, seqlen_k, dtype, out, scaling, causal, precision, batch, heads, seqlen_q, sm_count});
}
