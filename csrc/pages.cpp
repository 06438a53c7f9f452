#include "pages.h"

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

decode::HeadDescale head_descale(const View& tensor, const char* name, const View& like, int64_t sequences,
                                 int64_t kv_heads) {
  const float* const base = float_pointer(tensor, name, like);
  if (tensor.numel() == 1) return {base, 0, 0};
  if (tensor.dim() == 1) {
    require_shape(tensor, name, {kv_heads});
    return {base, 0, 1};
  }
  require_shape(tensor, name, {sequences, kv_heads});
  return {base, to_int(kv_heads, name), 1};
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

decode::Paged paged_of(const PagedViews& a, int64_t sequences, int64_t kv_heads, int64_t head_dim, int64_t most_keys,
                       const View& like) {
  decode::Paged p{};
  const CachePlaces cache = cache_places(a.k, a.v, kv_heads, head_dim, like);
  p.k = cache.k.as<decode::Cache>(), p.v = cache.v.as<decode::Cache>();
  if (a.k_token) p.k_token = token_descales(*a.k_token, cache, kv_heads, like).as<decode::TokenDescale>();
  if (a.v_page) p.v_token = page_descales(*a.v_page, cache, kv_heads, like).as<decode::TokenDescale>();
  p.k_descale = head_descale(a.k_descale, "k_descale", like, sequences, kv_heads);
  p.v_descale = head_descale(a.v_descale, "v_descale", like, sequences, kv_heads);
  const Table table = table_of(a.page_table, sequences, like);
  require(most_keys == table.entries * cache.page_size, "the page table has room for ", table.entries * cache.page_size,
          " keys, the work was cut for ", most_keys);
  p.page_table = table.base, p.table_row = table.row;
  p.by_page_size = decode::divisor(to_int(cache.page_size, "the tokens of a page"));
  p.pages = to_int(cache.pages, "the pages"), p.entries = to_int(table.entries, "the columns of page_table");
  for (const int64_t step : {p.k.page, p.k.token, p.k.head, p.v.page, p.v.token, p.v.head, p.k_token.page,
                             p.k_token.token, p.k_token.head, p.v_token.page, p.v_token.head, p.table_row})
    require(step >= 0 && step < int64_t{1} << 32, "a tensor of the call has a stride of ", step, ", which is too far");
  return p;
}

}  // namespace fp8cutlass
