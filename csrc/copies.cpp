#include "copies.h"

#include "check.h"
#include "workspace.h"

namespace fp8cutlass {

const PackEntry& find_copies(const VariantEntry& variant) {
  for (int i = 0; i < kPackCount; ++i) {
    if (!kPacks[i].quantises() && kPacks[i].head_dim == variant.head_dim) return kPacks[i];
  }
  fail("no pack kernel for FP8 operands of head_dim ", variant.head_dim, " is among the ", kPackCount,
       " that are built");
}

Fp8Operand copied(const View& x, const char* name, uint8_t* out, int64_t rows, bool flip) {
  Fp8Operand o{};
  const Strides strides = row_strides(x, name, false);
  require_aligned(x.data(), name);
  if (out == nullptr) return o;
  o.x = static_cast<const uint8_t*>(x.data());
  o.stride_batch = strides.batch, o.stride_head = strides.head, o.stride_row = strides.row;
  o.out = out;
  o.heads = to_int(x.size(1), name), o.tokens = to_int(x.size(2), name), o.rows = to_int(rows, name);
  o.flip = flip ? kFlip : 0;
  return o;
}

bool lowers(double amax) {
  require(amax >= 1, "score_amax is ", amax, ", less than 1");
  return amax < 448;
}

bool lowers_query(const VariantEntry& variant, const View& q) {
  constexpr int kMostRows = 128;
  const bool fits = variant.quantises_q && variant.tile_m <= kMostRows;
  return fits && q.size(3) == variant.head_dim && can_be_mapped(q, "q");
}

void lower_query(QueryScaling& query, double amax, double scale, bool early) {
  query.limit = static_cast<float>(amax), query.early = early, query.flip = scale < 0 ? kFlip : 0;
}

}  // namespace fp8cutlass
