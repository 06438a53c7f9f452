#include "pages.h"

#include <cmath>

#include "check.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kFloat = sizeof(float);

Places places_of(const View& cache, const char* name, const View& like) {
  require(cache.scalar_type() == ScalarType::Byte, name, " must be a uint8 view of FP8 data");
  require_same_device(cache, name, like);
  require_aligned(cache.data(), name);
  require(cache.stride(3) == 1, name, " must be contiguous in its last dimension");
  for (int i = 0; i < 3; ++i)
    require(cache.size(i) == 1 || (cache.stride(i) >= 0 && cache.stride(i) % kAlignment == 0), name,
            " must have strides of whole ", kAlignment, " bytes");
  return {static_cast<uint8_t*>(cache.data()), cache.stride(0), cache.stride(1), cache.stride(2)};
}

decode::HeadDescale head_descale(const std::optional<View>& given, double value, const char* name, const View& like,
                                 int64_t sequences, int64_t kv_heads) {
  if (!given) {
    require(std::isfinite(value) && value > 0, name, " must be a positive number, got ", value);
    return {nullptr, 0, 0, static_cast<float>(value)};
  }
  const View& tensor = *given;
  const auto* const base = reinterpret_cast<const float*>(strided_floats(tensor, name, like));
  if (tensor.numel() == 1) return {base, 0, 0, 0.f};
  const bool of_sequences = tensor.dim() == 2;
  if (of_sequences) {
    require_shape(tensor, name, {sequences, kv_heads});
  } else {
    require_shape(tensor, name, {kv_heads});
  }
  const int64_t row = of_sequences ? tensor.stride(0) : 0, head = tensor.stride(of_sequences ? 1 : 0);
  require(row >= 0 && head >= 0 && (sequences - 1) * row + (kv_heads - 1) * head < decode::kFar, name,
          " has strides that are too far");
  return {base, static_cast<int>(row), static_cast<int>(head), 0.f};
}

}  // namespace

int* int_pointer(const View& tensor, const char* name, const View& like, std::initializer_list<int64_t> shape) {
  require_shape(tensor, name, shape);
  return static_cast<int*>(dense_pointer(tensor, name, like, ScalarType::Int, "int32"));
}

uint8_t* strided_floats(const View& tensor, const char* name, const View& q) {
  require(tensor.scalar_type() == ScalarType::Float, name, " must be float32");
  require_same_device(tensor, name, q);
  return static_cast<uint8_t*>(tensor.data());
}

CachePlaces cache_places(const View& k, const View& v, int64_t kv_heads, int64_t head_dim, const View& like) {
  require(k.dim() == 4, "k_cache must have 4 dimensions, got shape ", shape_text(k));
  const int64_t pages = k.size(0), page_size = k.size(1);
  require(pages > 0 && page_size > 0, "k_cache has no page");
  require_shape(k, "k_cache", {pages, page_size, kv_heads, head_dim});
  require_shape(v, "v_cache", {pages, page_size, kv_heads, head_dim});
  return {pages, page_size, places_of(k, "k_cache", like), places_of(v, "v_cache", like)};
}

Places token_descales(const View& k_token, const CachePlaces& cache, int64_t kv_heads, const View& like) {
  const View& t = k_token;
  require_shape(t, "k_token_descale", {cache.pages, cache.page_size, kv_heads});
  return {strided_floats(t, "k_token_descale", like), kFloat * t.stride(0), kFloat * t.stride(1), kFloat * t.stride(2)};
}

Places page_descales(const View& v_page, const CachePlaces& cache, int64_t kv_heads, const View& like) {
  require_shape(v_page, "v_page_descale", {cache.pages, kv_heads});
  return {strided_floats(v_page, "v_page_descale", like), kFloat * v_page.stride(0), 0, kFloat * v_page.stride(1)};
}

Table table_of(const View& table, int64_t sequences, const View& like) {
  require(table.dim() == 2, "page_table must have 2 dimensions, got shape ", shape_text(table));
  const int64_t entries = table.size(1);
  require_shape(table, "page_table", {sequences, entries});
  require(table.scalar_type() == ScalarType::Int, "page_table must be int32");
  require_same_device(table, "page_table", like);
  require(entries > 0, "page_table has no column");
  require(table.stride(1) == 1 || entries == 1, "page_table must be contiguous in its last dimension");
  return {static_cast<const int*>(table.data()), table.stride(0), entries};
}

decode::Paged paged_of(const PagedViews& a, int64_t sequences, int64_t head_dim, const View& like) {
  decode::Paged p{};
  const View k = a.k.as_bytes("k_cache"), v = a.v.as_bytes("v_cache");
  require(k.dim() == 4, "k_cache must have 4 dimensions, got shape ", shape_text(k));
  const int64_t kv_heads = k.size(2);
  const CachePlaces cache = cache_places(k, v, kv_heads, head_dim, like);
  p.k = cache.k.as<decode::Cache>(), p.v = cache.v.as<decode::Cache>();
  if (a.k_token) p.k_token = token_descales(*a.k_token, cache, kv_heads, like).as<decode::TokenDescale>();
  if (a.v_page) p.v_token = page_descales(*a.v_page, cache, kv_heads, like).as<decode::TokenDescale>();
  p.k_descale = head_descale(a.k_descale, a.k_value, "k_descale", like, sequences, kv_heads);
  p.v_descale = head_descale(a.v_descale, a.v_value, "v_descale", like, sequences, kv_heads);
  p.by_page_size = decode::divisor(to_int(cache.page_size, "the tokens of a page"));
  p.pages = to_int(cache.pages, "the pages"), p.entries = 1;
  if (a.page_table) {
    const Table table = table_of(*a.page_table, sequences, like);
    p.page_table = table.base, p.table_row = table.row;
    p.entries = to_int(table.entries, "the columns of page_table");
  } else {
    require(p.pages >= sequences, "without page_table the cache has a page for each of ", sequences, " sequences, got ",
            p.pages);
  }
  for (const int64_t step : {p.k.page, p.k.token, p.k.head, p.v.page, p.v.token, p.v.head, p.k_token.page,
                             p.k_token.token, p.k_token.head, p.v_token.page, p.v_token.head, p.table_row})
    require(step >= 0 && step < int64_t{1} << 32, "a tensor of the call has a stride of ", step, ", which is too far");
  return p;
}

}  // namespace fp8cutlass
