#include "warpgroup.h"

#include <algorithm>
#include <cstdint>

#include "fp8cutlass/sm90/kernel_params.h"
#include "kernels.h"
#include "start.h"
#include "tensor_map.h"

namespace fp8cutlass {

namespace {

// The form for so many keys.
int form_of(const VariantEntry& variant, int keys) {
  for (int i = 0; i < kMostUnrolled; ++i) {
    const KeyRange& served = variant.unrolled[i];
    if (served.most > 0 && served.least <= keys && keys <= served.most) return i + 1;
  }
  return 0;
}

bool make_maps(sm90::KernelParams& params, const VariantEntry& variant, const ForwardParams& p,
               unsigned long long context) {
  const MapMaker maps(context);
  const bool is_fp8 = p.query.type == QueryType::fp8;
  if (!is_fp8 && !variant.quantises_q) return false;
  const int element = is_fp8 ? 1 : 2;
  const MapMaker::Rows q{p.q,
                         is_fp8 ? variant.head_dim : element * p.query.columns,
                         p.seqlen_q,
                         p.heads,
                         p.batch,
                         p.q_stride_row,
                         p.q_stride_head,
                         p.q_stride_batch};
  const MapMaker::Rows k{p.k,     variant.head_dim, p.seqlen_k,      p.kv_heads,
                         p.batch, p.k_stride_row,   p.k_stride_head, p.k_stride_batch};
  return maps.rows(params.q, q, element * variant.head_dim, variant.tile_m, params.q_head_step, params.q_batch_step) &&
         maps.rows(params.k, k, variant.head_dim, variant.slot_keys, params.k_head_step, params.k_batch_step) &&
         maps.values(params.v, p.v, p.seqlen_k_padded, variant.head_dim, int64_t{p.batch} * p.kv_heads,
                     variant.slot_keys, variant.head_dim / variant.parts);
}

}  // namespace

cudaError_t launch_warpgroup(const VariantEntry& variant, const ForwardParams& p, int device, cudaStream_t stream) {
  const int64_t items = p.ragged.most > 0 ? int64_t{p.ragged.most} * p.heads : work_items(p, variant.tile_m);
  if (items == 0) return cudaSuccess;
  if (items * variant.split + p.sm_count > INT32_MAX || p.seqlen_q > INT32_MAX - kTilePastEnd ||
      p.seqlen_k > INT32_MAX - kTilePastEnd ||
      (variant.mask != Mask::full && int64_t{p.seqlen_q} + p.seqlen_k > INT32_MAX - kTilePastEnd))
    return cudaErrorInvalidValue;
  if (!has_tensor_maps()) return cudaErrorNotSupported;
  sm90::KernelParams params{};
  params.p = p;
  params.order = work_order(p, variant.tile_m, variant.head_dim, variant.mask);
  params.want_lse = p.lse != nullptr;
  const unsigned long long context = context_id();
  if (!make_maps(params, variant, p, context)) return cudaErrorInvalidPitchValue;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(variant.split), 1, 1};
  const bool clusters = variant.split > 1;  // one an item, not persistent
  const int64_t ctas = clusters ? items * variant.split : std::min(items, int64_t{p.sm_count});
  void* arguments[] = {&params};
  return start(kernel_of(variant, form_of(variant, p.seqlen_k), device), {ctas, variant.threads, variant.smem_bytes},
               arguments, stream, context, attributes, clusters ? 2 : 1);
}

}  // namespace fp8cutlass
