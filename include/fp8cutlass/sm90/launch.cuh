// Host side of an sm_90a launch: tensor maps for the copy engine, then the persistent grid or the clusters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fp8cutlass/driver.h"
#include "fp8cutlass/params.h"
#include "fp8cutlass/walk/order.h"

namespace fp8cutlass::sm90 {

// What a kernel gets. A coordinate is multiplied by its step: 0 where a dimension is expanded (stride 0), for which
// tensor maps have no word.
struct KernelParams {
  CUtensorMap q, k, v;
  ForwardParams p;
  Order order;
  int q_head_step, q_batch_step, k_head_step, k_batch_step;
  int want_lse;  // p.lse is there: asked for every tile, and one word takes fewer instructions than a pointer
};

// cuTensorMapEncodeTiled of the driver that is loaded; null where it has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encoder;
}

// All that a map is made of: equal sources have equal maps. Words of 8 bytes, so that there is no padding to compare.
struct MapSource {
  uint64_t context;
  const void* base;
  uint64_t rank, dim[4], stride[3], box_width, box_rows, swizzle;
};

struct KnownMap {
  MapSource source;
  CUtensorMap map;
};

// Where this thread keeps the map of a tensor at `base` that it made last. Allocators give the same memory again and
// again, and to compare sources takes less time than to encode a map.
inline KnownMap& known_map(const void* base) {
  static thread_local KnownMap maps[64];
  return maps[slot_of(base)];
}

// A map of a tensor of bytes; false where strides or sizes are none that a map can have: `dims` and `strides` (bytes,
// from dimension 1 on) innermost first. A copy is a box of box_width x box_rows bytes; what lies outside of the tensor
// arrives as zeros. `context` is context_id().
template <int kRank>
bool encode(CUtensorMap& map, uint64_t context, const void* base, const int64_t (&dims)[kRank],
            const int64_t (&strides)[kRank - 1], int box_width, int box_rows, int swizzle) {
  MapSource source{context, base, kRank, {}, {}, uint64_t(box_width), uint64_t(box_rows), uint64_t(swizzle)};
  for (int i = 0; i < kRank; ++i) {
    source.dim[i] = uint64_t(dims[i]);
    if (i > 0) source.stride[i - 1] = uint64_t(strides[i - 1]);
  }
  KnownMap& known = known_map(base);
  if (context != 0 && std::memcmp(&known.source, &source, sizeof(source)) == 0) {
    map = known.map;
    return true;
  }
  cuuint64_t dim[kRank], stride[kRank - 1];
  cuuint32_t box[kRank], step[kRank];
  for (int i = 0; i < kRank; ++i) {
    dim[i] = cuuint64_t(dims[i]);
    box[i] = i == 0 ? box_width : i == 1 ? box_rows : 1;
    step[i] = 1;
    if (i > 0) stride[i - 1] = strides[i - 1] == 0 ? 16 : cuuint64_t(strides[i - 1]);  // 0: a dimension of size 1
  }
  const CUresult status = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(base), dim,
                                               stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                               swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) return false;
  known = {source, map};
  return true;
}

// Q or K: (D, S, H, B), of which expanded dimensions are given to the map with size 1. A row has row_bytes, at most the
// tile's.
template <class Tile>
bool encode_rows(CUtensorMap& map, uint64_t context, const void* base, int row_bytes, int tokens, int heads, int batch,
                 int64_t row, int64_t head, int64_t batch_stride, int& head_step, int& batch_step, int box_rows) {
  if (row == 0 && tokens > 1) return false;  // one row for all: no map can say so
  head_step = head != 0, batch_step = batch_stride != 0;
  return encode<4>(map, context, base, {row_bytes, tokens, head_step ? heads : 1, batch_step ? batch : 1},
                   {row, head, batch_stride}, Tile::kWidth, box_rows, Tile::kWidth);
}

// Q in the type that the kernel is given. SourceTile: a tile of its 16-bit rows, or void where only FP8 is taken.
// kBoxRows of them are copied at a time.
template <class SourceTile, class QTile, int kBoxRows>
bool encode_query(KernelParams& params, uint64_t context, const ForwardParams& p) {
  const auto encode_as = [&](auto tile, int row_bytes) {
    using Tile = decltype(tile);
    return encode_rows<Tile>(params.q, context, p.q, row_bytes, p.seqlen_q, p.heads, p.batch, p.q_stride_row,
                             p.q_stride_head, p.q_stride_batch, params.q_head_step, params.q_batch_step, kBoxRows);
  };
  if (p.query.type == QueryType::fp8) return encode_as(QTile{}, QTile::kRowBytes);
  if constexpr (!std::is_void_v<SourceTile>) return encode_as(SourceTile{}, 2 * p.query.columns);
  return false;
}

// kSplit > 1: one cluster of kSplit CTAs an item, not persistent.
template <class SourceTile, class QTile, class KTile, class VTile, int kParts, int kSplit, Mask kMask>
int launch(void (*kernel)(KernelParams), int threads, int smem_bytes, const ForwardParams& p, CUstream_st* stream) {
  constexpr int kHeadDim = QTile::kRowBytes;
  KernelParams params{};
  params.p = p;
  params.p.item_rows = fewest_item_rows<QTile::kRows, kMask>(p);
  const int together = item_heads<QTile::kRows, kMask>(params.p);
  const int64_t items = p.ragged.most > 0 ? int64_t{p.ragged.most} * (p.heads / together)
                                          : work_items(p, item_rows<QTile::kRows, kMask>(params.p), together);
  if (items == 0) return cudaSuccess;
  // Item numbers, and the rows and keys of a tile past the end, are 32-bit in the kernel.
  constexpr int kTilePastEnd = 256;
  if (items * kSplit + p.sm_count > INT32_MAX || p.seqlen_q > INT32_MAX - kTilePastEnd ||
      p.seqlen_k > INT32_MAX - kTilePastEnd ||
      (kMask != Mask::full && int64_t(p.seqlen_q) + p.seqlen_k > INT32_MAX - kTilePastEnd))
    return cudaErrorInvalidValue;
  if (tensor_map_encoder() == nullptr) return cudaErrorNotSupported;
  params.order = work_order<QTile::kRows, kHeadDim, kMask>(params.p);
  params.want_lse = p.lse != nullptr;
  const int64_t keys = p.seqlen_k_padded;
  const unsigned long long context = context_id();
  constexpr int kBoxRows = kMask == Mask::window ? QTile::kRows / 2 : QTile::kRows;  // two heads may share a tile
  if (!encode_query<SourceTile, QTile, kBoxRows>(params, context, p) ||
      !encode_rows<KTile>(params.k, context, p.k, KTile::kRowBytes, p.seqlen_k, p.kv_heads, p.batch, p.k_stride_row,
                          p.k_stride_head, p.k_stride_batch, params.k_head_step, params.k_batch_step, KTile::kRows) ||
      !encode<3>(params.v, context, p.v, {keys, kHeadDim, int64_t(p.batch) * p.kv_heads}, {keys, keys * kHeadDim},
                 VTile::kWidth, kHeadDim / kParts, VTile::kWidth))
    return cudaErrorInvalidPitchValue;
  const cudaError_t status = opt_in(reinterpret_cast<const void*>(kernel), smem_bytes, context);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(kSplit > 1 ? items * kSplit : items < p.sm_count ? items : p.sm_count));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kSplit > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace fp8cutlass::sm90
