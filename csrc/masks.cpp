#include "masks.h"

#include "check.h"
#include "device.h"
#include "fp8cutlass/mask/params.h"
#include "kernels.h"
#include "start.h"
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

TileMask lists_of(const MaskTensors& tensors, const ForwardParams& p, const VariantEntry& variant, int device) {
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

Bias bias_of(const MaskTensors& tensors, const ForwardParams& p, const VariantEntry& variant, int device) {
  require(variant.biased == tensors.bias.has_value(), "variant ", variant.id,
          variant.biased ? " needs a bias" : " adds no bias");
  if (!variant.biased) return {};
  const View x(*tensors.bias);
  const int64_t sizes[4] = {p.batch, p.heads, p.seqlen_q, p.seqlen_k};
  require(x.dim() == 4 && x.is_cuda() && x.device() == device, "bias must have 4 dimensions, on device ", device);
  for (int dim = 0; dim < 4; ++dim)
    if (x.size(dim) != 1 && x.size(dim) != sizes[dim])
      fail("bias must broadcast to (", sizes[0], ", ", sizes[1], ", ", sizes[2], ", ", sizes[3], "), got ",
           shape_text(x));
  const ScalarType type = x.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
          "bias must be float32, bfloat16 or float16");
  const auto stride = [&](int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; };
  Bias bias{x.data(), stride(0), stride(1), stride(2), stride(3), BiasType::f32, false, false};
  if (type != ScalarType::Float) bias.type = type == ScalarType::BFloat16 ? BiasType::bf16 : BiasType::fp16;
  const int64_t together = bias.stride_batch | bias.stride_head | bias.stride_row;
  const auto aligned = [&](int64_t keys) {
    return bias.stride_key == 1 && together % keys == 0 &&
           reinterpret_cast<uintptr_t>(bias.data) % (keys * x.element_size()) == 0;
  };
  bias.pairs = aligned(2);
  bias.chunks = aligned(16 / int64_t(x.element_size()));
  return bias;
}

}  // namespace

MaskParams mask_params(const MaskTensors& tensors, const ForwardParams& p, const VariantEntry& variant, int device) {
  return {lists_of(tensors, p, variant, device), bias_of(tensors, p, variant, device)};
}

void pack_mask(const torch::stable::Tensor& given, int64_t keys, const torch::stable::Tensor& tiles,
               const torch::stable::Tensor& counts, const torch::stable::Tensor& bits) {
  const View seen(given);
  require(seen.dim() == 4 && seen.scalar_type() == ScalarType::Bool && seen.is_cuda(),
          "seen must be bool with 4 dimensions, on a card");
  const int device = static_cast<int>(seen.device());
  const int64_t batch = seen.size(0), heads = seen.size(1), rows = seen.size(2), columns = seen.size(3);
  if (batch == 0 || heads == 0 || rows == 0 || columns == 0 || keys <= 0)
    fail("an empty mask takes no launch: seen has shape ", shape_text(seen));
  require(columns == 1 || columns == keys, "seen has ", columns, " columns, there are ", keys, " keys");
  masking::PackMaskParams p{};
  p.heads = to_int(heads, "the heads of the mask");
  p.rows = to_int(rows, "the rows of the mask"), p.columns = to_int(columns, "its columns");
  p.keys = to_int(keys, "the number of keys");
  p.row_tiles = ceil_div(p.rows, kMaskTile), p.key_tiles = ceil_div(p.keys, kMaskTile);
  p.bit_tiles = columns == 1 ? 1 : p.key_tiles;
  const int64_t lists = batch * heads * p.row_tiles;
  to_int(lists, "the number of lists");
  const auto room = [&](const torch::stable::Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
    const View x = words_of(tensor, name, static_cast<int64_t>(shape.size()), device);
    require_shape(x, name, shape);
    return x.data();
  };
  p.tiles = static_cast<int*>(room(tiles, "tiles", {batch, heads, p.row_tiles, p.key_tiles}));
  p.counts = static_cast<int*>(room(counts, "counts", {batch, heads, p.row_tiles}));
  p.bits = static_cast<uint32_t*>(room(bits, "bits", {batch, heads, p.row_tiles, p.bit_tiles, kMaskTileWords}));
  require_aligned(p.bits, "bits");
  p.seen = static_cast<const uint8_t*>(seen.data());
  const auto stride = [&](int dim) { return seen.size(dim) > 1 ? seen.stride(dim) : 0; };
  p.stride_batch = stride(0), p.stride_head = stride(1), p.stride_row = stride(2), p.stride_column = stride(3);
  const int64_t together = reinterpret_cast<int64_t>(p.seen) | p.stride_batch | p.stride_head | p.stride_row | columns;
  p.word = p.stride_column != 1 ? 1 : together % 16 == 0 ? 16 : together % 4 == 0 ? 4 : 1;
  constexpr int kMostFlags = 48 * 1024;
  require(p.bit_tiles <= kMostFlags, "a mask of ", keys, " keys is too large to be packed");
  const DeviceGuard guard(device);
  void* arguments[] = {&p};
  check_launch(start(kernel_of(Single::pack_mask, device), {lists, masking::kMaskThreads, p.bit_tiles}, arguments,
                     current_stream(device), context_id()),
               "pack_mask", device);
}

}  // namespace fp8cutlass
