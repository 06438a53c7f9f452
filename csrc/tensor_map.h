// Tensor maps for the copy engine, made by the driver that is loaded and kept where nothing has changed.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp8cutlass {

// Whether the driver can make any.
bool has_tensor_maps();

// Makes maps in the context whose number context_id() gives. What they return is false where strides or sizes are none
// that a map can have. A copy is a box of box_width x box_rows bytes; what lies outside of the tensor arrives as zeros.
class MapMaker {
 public:
  explicit MapMaker(unsigned long long context) : context_(context) {}

  // Of rows (B, heads, tokens, row_bytes), strides in bytes, each row at most as long as the tile's tile_bytes.
  // Expanded dimensions are given to the map with size 1, and their step becomes 0, else 1.
  struct Rows {
    const void* base;
    int row_bytes, tokens, heads, batch;
    int64_t row, head, batch_stride;
  };
  bool rows(CUtensorMap& map, const Rows& of, int tile_bytes, int box_rows, int& head_step, int& batch_step) const;

  // Of packed V^T (heads, columns, keys), contiguous; boxes of tile_keys keys and box_columns columns.
  bool values(CUtensorMap& map, const void* base, int64_t keys, int columns, int64_t heads, int tile_keys,
              int box_columns) const;

 private:
  unsigned long long context_;
};

}  // namespace fp8cutlass
