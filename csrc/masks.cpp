#include "masks.h"

#include "check.h"
#include "tensors.h"

namespace fp8cutlass {

namespace {

// Contiguous int32 of `rank` dimensions on the device.
View words_of(const torch::stable::Tensor& tensor, const char* name, int64_t rank, int device) {
  const View x(tensor);
  if (x.dim() != rank || x.scalar_type() != ScalarType::Int || !x.is_contiguous() || !x.is_cuda() ||
      x.device() != device)
    fail(name, " must be contiguous int32 with ", rank, " dimensions on device ", device, ", got shape ",
         shape_text(x));
  return x;
}

}  // namespace

TileMask tile_mask(const MaskTensors& tensors, const ForwardParams& p, const VariantEntry& variant, int device) {
  const bool listed = variant.mask == Mask::blocks;
  require(listed == tensors.tiles.has_value() && listed == tensors.counts.has_value() &&
              (listed || !tensors.bits.has_value()),
          "variant ", variant.id, listed ? " needs tiles and counts of a mask" : " takes no lists of a mask");
  if (!listed) return {};
  const int64_t row_tiles = ceil_div(p.seqlen_q, kMaskTile), key_tiles = ceil_div(p.seqlen_k, kMaskTile);
  const View tiles = words_of(*tensors.tiles, "tiles", 4, device);
  const int64_t batch = tiles.size(0), heads = tiles.size(1), rows = tiles.size(2);
  const bool fits = (batch == 1 || batch == p.batch) && (heads == 1 || heads == p.heads) &&
                    (rows == 1 || rows == row_tiles) && tiles.size(3) == key_tiles;
  if (!fits)
    fail("tiles must broadcast to (", p.batch, ", ", p.heads, ", ", row_tiles, ", ", key_tiles, "), got ",
         shape_text(tiles));
  const View counts = words_of(*tensors.counts, "counts", 3, device);
  require_shape(counts, "counts", {batch, heads, rows});
  TileMask mask{};
  mask.tiles = static_cast<const int*>(tiles.data());
  mask.counts = static_cast<const int*>(counts.data());
  mask.key_tiles = to_int(key_tiles, "the number of key tiles");
  mask.bit_tiles = mask.key_tiles;
  to_int(batch * heads * rows, "the number of lists");
  mask.list_batch = batch > 1 ? static_cast<int>(heads * rows) : 0;
  mask.list_head = heads > 1 ? static_cast<int>(rows) : 0;
  mask.list_row = rows > 1;
  if (tensors.bits) {
    const View bits = words_of(*tensors.bits, "bits", 5, device);
    const int64_t columns = bits.size(3) == 1 ? 1 : key_tiles;
    require_shape(bits, "bits", {batch, heads, rows, columns, kMaskTileWords});
    require_aligned(bits.data(), "bits");
    to_int(batch * heads * rows * columns * kVisitFlags, "the number of tiles with bits");
    mask.bit_tiles = static_cast<int>(columns);
    mask.bits = static_cast<const uint32_t*>(bits.data());
  }
  return mask;
}

}  // namespace fp8cutlass
