#include "append.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "device.h"
#include "fp8cutlass/append/params.h"
#include "kernels.h"
#include "pages.h"
#include "start.h"

namespace fp8cutlass {

namespace {

using appending::AppendParams;

constexpr int64_t kMostWork = int64_t{1} << 30;  // rows of a launch, and slots of a cache
constexpr int64_t kMostPage = int64_t{1} << 24;  // tokens
// Tokens of a list of slots whose rows one launch writes: each CTA looks through those of its launch for a later token
// of its slots. Launches of one stream write one after the other, so that the last token wins across them too.
constexpr int64_t kChunk = 4096;

int type_of(const View& x, const char* name, bool fp8) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return appending::kBf16;
    case ScalarType::Half:
      return appending::kFp16;
    case ScalarType::Float:
      return appending::kFp32;
    default:
      require(fp8 && x.scalar_type() == ScalarType::Byte, name, " must be bfloat16, float16 or float32",
              fp8 ? ", or a uint8 view of FP8 data" : "");
      return appending::kE4m3;
  }
}

appending::Rows rows_of(const View& x, const char* name) {
  require(x.stride(2) == 1, name, " must be contiguous in its last dimension");
  const int64_t bytes = x.element_size();
  const int64_t token = x.size(0) == 1 ? 0 : x.stride(0) * bytes, head = x.size(1) == 1 ? 0 : x.stride(1) * bytes;
  require(token >= 0 && head >= 0 && token % kAlignment == 0 && head % kAlignment == 0, name,
          " must have rows that begin on multiples of ", kAlignment, " bytes");
  require_aligned(x.data(), name);
  return {static_cast<const uint8_t*>(x.data()), token, head};
}

// Of a cache that is written.
appending::Store store_of(const Places& places, const View& cache, const char* name) {
  for (int i = 0; i < 3; ++i) require(cache.size(i) == 1 || cache.stride(i) > 0, name, " is expanded in dimension ", i);
  return places.as<appending::Store>();
}

appending::Numbers numbers_of(const View& x, const char* name, const View& k) {
  require_shape(x, name, {k.size(0)});
  require(x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long, name, " must be int32 or int64");
  require(x.is_contiguous(), name, " must be contiguous");
  require_same_device(x, name, k);
  return {x.data(), x.scalar_type() == ScalarType::Long ? 1 : 0};
}

appending::GivenDescale given_of(const View& x, const char* name, const View& k, int64_t rows) {
  const auto* const base = reinterpret_cast<const float*>(strided_floats(x, name, k));
  if (x.dim() == 1) {
    require_shape(x, name, {k.size(1)});
    return {base, 0, x.stride(0)};
  }
  require_shape(x, name, {rows, k.size(1)});
  return {base, x.stride(0), x.stride(1)};
}

void set_places(AppendParams& p, const AppendArguments& a) {
  if (a.slots) {
    require(!a.cu && !a.lengths && !a.table && !a.used, "slots go with no page table");
    p.slots = numbers_of(*a.slots, "slots", a.k);
    if (a.positions) p.positions = numbers_of(*a.positions, "positions", a.k);
    require(a.positions.has_value() == a.cos.has_value(), "positions go with rotary_cos");
    return;
  }
  require(a.cu && a.lengths && a.table, "without slots there must be cu_seqlens, lengths and page_table");
  require(!a.positions, "positions go with slots");
  const int64_t sequences = a.lengths->numel();
  require(sequences > 0, "lengths has no sequence");
  p.lengths = int_pointer(*a.lengths, "lengths", a.k, {sequences});
  p.cu = int_pointer(*a.cu, "cu_seqlens", a.k, {sequences + 1});
  const Table table = table_of(*a.table, sequences, a.k);
  p.table = table.base, p.table_row = table.row;
  p.sequences = to_int(sequences, "the sequences"), p.entries = to_int(table.entries, "the columns of page_table");
  require(table.entries * int64_t{p.page_size} < kMostWork, "page_table has room for too many tokens");
  if (a.used) p.used = int_pointer(*a.used, "used", a.k, {sequences});
  // Threads enough for the pages that the new tokens of a sequence take, on average.
  const int64_t columns = a.k.size(0) / sequences / p.page_size + 1;
  for (p.width = 1; p.width < columns && p.width < 32;) p.width *= 2;
}

void set_turn(AppendParams& p, const AppendArguments& a) {
  require(a.cos.has_value() == a.sin.has_value(), "rotary_cos and rotary_sin go together");
  if (!a.cos) return;
  const View &cos = *a.cos, &sin = *a.sin;
  require(cos.dim() == 2 && cos.size(0) > 0, "rotary_cos must be (S, R / 2), got shape ", shape_text(cos));
  require_shape(sin, "rotary_sin", {cos.size(0), cos.size(1)});
  require(cos.size(1) > 0 && cos.size(1) % 8 == 0 && 2 * cos.size(1) <= p.head_dim, "rotary_cos has ", cos.size(1),
          " columns for a head_dim of ", p.head_dim);
  p.angle_type = type_of(cos, "rotary_cos", false);
  require(sin.scalar_type() == cos.scalar_type(), "rotary_sin must have the type of rotary_cos");
  require(cos.is_contiguous() && sin.is_contiguous(), "rotary_cos and rotary_sin must be contiguous");
  require_same_device(cos, "rotary_cos", a.k), require_same_device(sin, "rotary_sin", a.k);
  require_aligned(cos.data(), "rotary_cos"), require_aligned(sin.data(), "rotary_sin");
  const int64_t row = cos.size(1) * cos.element_size();
  p.cos = {static_cast<const uint8_t*>(cos.data()), row}, p.sin = {static_cast<const uint8_t*>(sin.data()), row};
  p.half = to_int(cos.size(1), "the columns of rotary_cos");
  p.table_rows = to_int(cos.size(0), "the rows of rotary_cos");
  p.interleaved = a.interleaved ? 1 : 0;
}

void set_rotation(AppendParams& p, const AppendArguments& a) {
  if (a.k_mean) {
    const View& mean = *a.k_mean;
    require_shape(mean, "k_mean", {a.k.size(1), a.k.size(2)});
    p.mean = reinterpret_cast<const float*>(strided_floats(mean, "k_mean", a.k));
    p.mean_head = mean.size(0) == 1 ? 0 : mean.stride(0);
    require(mean.stride(1) == 1 && p.mean_head % 4 == 0, "k_mean must have contiguous rows of whole 16 bytes");
    require_aligned(p.mean, "k_mean");
  }
  if (!a.hadamard) return;
  const int columns = (p.head_dim & (p.head_dim - 1)) == 0 ? p.head_dim : p.head_dim / 3;
  require((columns & (columns - 1)) == 0 && columns >= appending::kColumns && p.head_dim % columns == 0,
          "keys of head_dim ", p.head_dim, " cannot be rotated");
  p.rotated = columns, p.rotation_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(columns)));
}

void set_descales(AppendParams& p, const AppendArguments& a, const CachePlaces& cache) {
  const int64_t rows = a.slots ? p.tokens : p.sequences;
  if (a.k_token) {
    p.k_token = token_descales(*a.k_token, cache, p.heads, a.k).as<appending::PageDescale>();
  } else {
    require(a.k_descale.has_value() || p.type == appending::kE4m3, "k_descale is missing");
    if (a.k_descale) p.k_descale = given_of(*a.k_descale, "k_descale", a.k, rows);
  }
  if (a.v_page) p.v_page = page_descales(*a.v_page, cache, p.heads, a.k).as<appending::PageDescale>();
  require(a.v_descale.has_value() || a.v_page.has_value(), "v_descale is missing");
  if (a.v_descale) p.v_descale = given_of(*a.v_descale, "v_descale", a.k, rows);
  require(p.type != appending::kE4m3 || (!a.k_token && !a.v_page && !a.cos && !a.k_mean && !a.hadamard),
          "keys and values in FP8 are copied as they are: they go to pages without descales, unchanged");
}

}  // namespace

void append_tokens(const AppendArguments& a) {
  AppendParams p{};
  require(a.k.is_cuda(), "k is not on a card");
  require(a.k.dim() == 3, "k must have 3 dimensions, got shape ", shape_text(a.k));
  const int64_t tokens = a.k.size(0), heads = a.k.size(1), head_dim = a.k.size(2);
  require_shape(a.v, "v", {tokens, heads, head_dim});
  require_same_device(a.v, "v", a.k);
  require(a.v.scalar_type() == a.k.scalar_type(), "k and v must have one type");
  require(tokens > 0 && heads > 0, "k has no token or no head");
  require(head_dim % appending::kColumns == 0 && head_dim > 0 && head_dim <= appending::kMostHeadDim,
          "head_dim must be a multiple of ", appending::kColumns, " up to ", appending::kMostHeadDim, ", got ",
          head_dim);
  p.type = type_of(a.k, "k", true), p.k = rows_of(a.k, "k"), p.v = rows_of(a.v, "v");
  p.tokens = to_int(tokens, "the tokens"), p.heads = to_int(heads, "the heads"), p.head_dim = int(head_dim);
  while ((appending::kColumns << p.lane_bits) < p.head_dim) ++p.lane_bits;

  const CachePlaces cache = cache_places(a.k_cache, a.v_cache, heads, head_dim, a.k);
  const int64_t pages = cache.pages, page_size = cache.page_size;
  require(page_size <= kMostPage, "a page has ", page_size, " tokens: too many");
  require(pages <= kMostWork / page_size, "k_cache has too many slots");
  p.k_store = store_of(cache.k, a.k_cache, "k_cache"), p.v_store = store_of(cache.v, a.v_cache, "v_cache");
  p.pages = int(pages), p.page_size = int(page_size);
  set_places(p, a), set_turn(p, a), set_rotation(p, a), set_descales(p, a, cache);

  // V's descale grows by CTAs of pages. They come with the last rows, and see all tokens.
  const bool grows = p.v_descale.base == nullptr;
  const int64_t of_token = grows ? heads : 2 * heads;
  require(tokens * 2 * heads < kMostWork, "k has ", tokens, " tokens of ", heads, " heads: too many");
  const int64_t smem = appending::kAppendBytes + (grows ? 4 * page_size : 0);
  require(smem <= 48 * 1024, "pages of ", page_size, " tokens are too large for a descale of V that grows");

  const int device = static_cast<int>(a.k.device());
  const DeviceGuard guard(device);
  const int64_t chunk = a.slots ? kChunk : tokens, rows_of_cta = appending::kAppendThreads >> p.lane_bits;
  for (int64_t first = 0; first < tokens; first += chunk) {
    p.first = int(first), p.count = int(std::min(chunk, tokens - first));
    const int64_t row_ctas = (p.count * of_token + rows_of_cta - 1) / rows_of_cta;
    p.row_ctas = int(row_ctas);
    const int64_t page_ctas = grows && first + chunk >= tokens ? tokens * heads : 0;
    void* arguments[] = {&p};
    const LaunchShape shape{row_ctas + page_ctas, appending::kAppendThreads, static_cast<int>(smem)};
    const cudaStream_t stream = current_stream(device);
    check_launch(start_beside(kernel_of(Single::append, device), shape, arguments, stream, context_id(), device),
                 "append", device);
  }
}

}  // namespace fp8cutlass
