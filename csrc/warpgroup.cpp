#include "warpgroup.h"

#include <algorithm>
#include <cstdint>

#include "fp8cutlass/sm90/kernel_params.h"
#include "kernels.h"
#include "start.h"
#include "tensor_map.h"

namespace fp8cutlass {

namespace {

// The form for so many keys. plain: without LSE, sinks and amax.
int form_of(const VariantEntry& variant, int keys, bool plain) {
  for (int i = 0; i < kMostUnrolled; ++i) {
    const KeyRange& served = variant.unrolled[i];
    if (served.plain && !plain) continue;
    if (served.most > 0 && served.least <= keys && keys <= served.most) return i + 1;
  }
  return plain && variant.plain ? kPlainForm : 0;
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
  const int q_rows = variant.mask == Mask::window ? variant.tile_m / 2 : variant.tile_m;  // two heads may share a tile
  return maps.rows(params.q, q, element * variant.head_dim, q_rows, params.q_head_step, params.q_batch_step) &&
         maps.rows(params.k, k, variant.head_dim, variant.slot_keys, params.k_head_step, params.k_batch_step) &&
         maps.values(params.v, p.v, p.seqlen_k_padded, variant.head_dim, int64_t{p.batch} * p.kv_heads,
                     variant.slot_keys, variant.head_dim / variant.parts);
}

}  // namespace

cudaError_t launch_warpgroup(const VariantEntry& variant, const ForwardParams& p, const MaskParams& mask, int device,
                             cudaStream_t stream) {
  sm90::KernelParams params{};
  params.p = p;
  params.mask = mask.lists;
  params.bias = mask.bias;
  params.p.item_rows = fewest_item_rows(p, variant.tile_m, variant.mask);
  const int together = item_heads(params.p, variant.tile_m, variant.mask);
  const int64_t items = p.ragged.most > 0 ? int64_t{p.ragged.most} * (p.heads / together)
                                          : work_items(p, item_rows(params.p, variant.tile_m, variant.mask), together);
  if (items == 0) return cudaSuccess;
  if (items * variant.split + p.sm_count > INT32_MAX || p.seqlen_q > INT32_MAX - kTilePastEnd ||
      p.seqlen_k > INT32_MAX - kTilePastEnd ||
      (variant.mask != Mask::full && int64_t{p.seqlen_q} + p.seqlen_k > INT32_MAX - kTilePastEnd))
    return cudaErrorInvalidValue;
  if (!has_tensor_maps()) return cudaErrorNotSupported;
  params.order = work_order(params.p, variant.tile_m, variant.head_dim, variant.mask);
  params.want_lse = p.lse != nullptr && p.merge_lse == 0;
  params.extras = p.lse != nullptr || p.amax != nullptr || p.sinks != nullptr;
  const unsigned long long context = context_id();
  if (!make_maps(params, variant, p, context)) return cudaErrorInvalidPitchValue;
  cudaLaunchAttribute attributes[2] = {runs_beside(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(variant.split), 1, 1};
  const bool clusters = variant.split > 1;  // one an item, not persistent
  const int64_t ctas = clusters ? items * variant.split : std::min(items, int64_t{p.sm_count});
  void* arguments[] = {&params};
  const int form = form_of(variant, p.seqlen_k, params.extras == 0);
  return start(kernel_of(variant, form, device), {ctas, variant.threads, variant.smem_bytes}, arguments, stream,
               context, attributes, clusters ? 2 : 1);
}

}  // namespace fp8cutlass
