#include "tensor_map.h"

#include <cstring>

#include "driver.h"
#include "fp8cutlass/sm90/operand.h"

namespace fp8cutlass {

namespace {

// cuTensorMapEncodeTiled of the driver that is loaded; null where it has none.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
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
KnownMap& known_map(const void* base) {
  static thread_local KnownMap maps[64];
  return maps[slot_of(base)];
}

// A map of a tensor of bytes: `dims` and `strides` (bytes, from dimension 1 on) innermost first.
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

}  // namespace

bool has_tensor_maps() { return tensor_map_encoder() != nullptr; }

bool MapMaker::rows(CUtensorMap& map, const Rows& of, int tile_bytes, int box_rows, int& head_step,
                    int& batch_step) const {
  if (of.row == 0 && of.tokens > 1) return false;  // one row for all: no map can say so
  head_step = of.head != 0, batch_step = of.batch_stride != 0;
  const int width = sm90::swizzle_width(tile_bytes);
  return encode<4>(map, context_, of.base,
                   {of.row_bytes, of.tokens, head_step ? of.heads : 1, batch_step ? of.batch : 1},
                   {of.row, of.head, of.batch_stride}, width, box_rows, width);
}

bool MapMaker::values(CUtensorMap& map, const void* base, int64_t keys, int columns, int64_t heads, int tile_keys,
                      int box_columns) const {
  const int width = sm90::swizzle_width(tile_keys);
  return encode<3>(map, context_, base, {keys, columns, heads}, {keys, keys * columns}, width, box_columns, width);
}

}  // namespace fp8cutlass
