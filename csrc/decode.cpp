#include "decode.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "device.h"
#include "fp8cutlass/decode/params.h"
#include "kernels.h"
#include "numbers.h"
#include "pages.h"
#include "start.h"
#include "workspace.h"

namespace fp8cutlass {

namespace {

// A window's end, so far that adding it to any position stays within 32 bits.
int window_end(int64_t keys) { return static_cast<int>(std::clamp<int64_t>(keys, 0, decode::kFar)); }

}  // namespace

decode::Batch batch_of(const DecodeBatch& b, const DecodeNumbers& n) {
  decode::Batch batch{};
  require(b.lengths.is_cuda(), "cache_seqlens is not on a card");
  const int64_t sequences = b.lengths.numel();
  batch.lengths = int_pointer(b.lengths, "cache_seqlens", b.lengths, {sequences});
  require(b.kv_heads > 0 && b.heads > 0 && b.heads % b.kv_heads == 0, "q has ", b.heads,
          " heads, which is no multiple of the cache's ", b.kv_heads);
  require(sequences > 0, "cache_seqlens has no sequence");
  if (b.cu_q) {
    batch.cu_q = int_pointer(*b.cu_q, "cu_seqlens_q", b.lengths, {sequences + 1});
  } else {
    require(b.total_q % sequences == 0, "q has ", b.total_q, " tokens for ", sequences, " sequences");
    batch.each = static_cast<int>(b.total_q / sequences);
  }
  batch.total_q = to_int(b.total_q, "the queries"), batch.sequences = to_int(sequences, "the number of sequences");
  require(b.most_keys >= 0 && b.most_keys < decode::kFar, "the page table has room for ", b.most_keys, " keys");
  require(b.total_q * b.heads < decode::kFar, "q has ", b.total_q, " rows of ", b.heads, " heads: too many");
  batch.most_keys = static_cast<int>(b.most_keys);
  batch.heads = to_int(b.heads, "the number of heads"), batch.kv_heads = to_int(b.kv_heads, "that of the cache");
  batch.by_group = decode::divisor(batch.heads / batch.kv_heads), batch.by_kv_heads = decode::divisor(batch.kv_heads);
  batch.left = window_end(n.left), batch.right = window_end(n.right);
  batch.routed = n.routed;
  return batch;
}

View rows_of(const View& x, const char* name) {
  require(x.dim() == 3 || x.dim() == 4, name, " must have 3 or 4 dimensions, got shape ", shape_text(x));
  return x.dim() == 4 ? x.joined(name) : x;
}

namespace {

// Pieces of the memory that both kernels share. native/decode.py allocates as many bytes.
struct Work {
  int ctas;
  decode::Cut* cuts;
  unsigned* arrived;
  float* parts;
};

int64_t work_bytes(const DecodeEntry& entry, int64_t ctas, int64_t* pieces) {
  Layout layout;
  pieces[0] = layout.add((ctas + 1) * int64_t{sizeof(decode::Cut)});
  pieces[1] = layout.add(ctas * decode::kArrivals * int64_t{sizeof(unsigned)});
  pieces[2] = layout.add(2 * ctas * entry.part_floats * int64_t{sizeof(float)});
  return layout.total();
}

Work work_of(const DecodeEntry& entry, const DecodeNumbers& n, const View& memory, const View& like) {
  int64_t at[3];
  require(n.ctas > 0, "the work is for ", n.ctas, " CTAs");
  const int64_t bytes = work_bytes(entry, n.ctas, at);
  require(memory.numel() == bytes, "work has ", memory.numel(), " bytes, ", entry.id, " needs ", bytes);
  auto* const base = static_cast<uint8_t*>(dense_pointer(memory, "work", like, ScalarType::Byte, "uint8"));
  require_aligned(base, "work");
  return {to_int(n.ctas, "the CTAs"), reinterpret_cast<decode::Cut*>(base + at[0]),
          reinterpret_cast<unsigned*>(base + at[1]), reinterpret_cast<float*>(base + at[2])};
}

// Strides of (tokens, heads, D) in elements, for accesses of so many bytes.
void row_steps(const View& tensor, const char* name, int64_t bytes, int64_t& row, int64_t& head) {
  require(tensor.stride(2) == 1, name, " must be contiguous in its last dimension");
  row = tensor.size(0) == 1 ? 0 : tensor.stride(0), head = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  const bool whole = row * tensor.element_size() % bytes == 0 && head * tensor.element_size() % bytes == 0;
  require(row >= 0 && head >= 0 && whole && reinterpret_cast<uintptr_t>(tensor.data()) % bytes == 0, name,
          " must have rows that begin on multiples of ", bytes, " bytes");
}

int sink_type(const View& sinks) {
  switch (sinks.scalar_type()) {
    case ScalarType::Float:
      return decode::kSinkFp32;
    case ScalarType::BFloat16:
      return decode::kSinkBf16;
    default:
      require(sinks.scalar_type() == ScalarType::Half, "sinks must be float32, bfloat16 or float16");
      return decode::kSinkFp16;
  }
}

void set_sinks(decode::DecodeParams& p, const View& sinks, const DecodeBatch& b, const View& q) {
  require(sinks.is_contiguous(), "sinks must be contiguous");
  require_same_device(sinks, "sinks", q);
  p.sinks = sinks.data(), p.sink_type = sink_type(sinks), p.sink_head = 1;
  if (sinks.dim() == 1) {
    require_shape(sinks, "sinks", {b.heads});
  } else {
    require_shape(sinks, "sinks", {b.heads, b.total_q});
    p.sink_head = b.total_q, p.sink_token = 1;
  }
}

void launch_cut(const DecodeEntry& entry, const DecodeNumbers& n, const decode::Batch& batch, const Work& work,
                int device) {
  require(n.overhead > 0, "a unit's overhead must be positive, got ", n.overhead);
  decode::CutParams p{batch,    entry.rows, entry.tile,  work.ctas, to_int(n.overhead, "the overhead"),
                      !n.share, work.cuts,  work.arrived};
  void* arguments[] = {&p};
  const LaunchShape shape{1, decode::kCutThreads, decode::kCutBytes};
  const cudaStream_t stream = current_stream(device);
  check_launch(start_beside(kernel_of(Single::cut, device), shape, arguments, stream, context_id(), device), "cut",
               device);
}

}  // namespace

DecodeNumbers decode_numbers(const Tensor& numbers) {
  constexpr int64_t kNumbers = 0
#define X(type, name, meaning) +1
#include "decode.def"
#undef X
      ;
  const double* x = numbers_of(numbers, kNumbers);
  DecodeNumbers read{};
#define X(type, name, meaning) read.name = number_as<type>(*x++, #name);
#include "decode.def"
#undef X
  return read;
}

void cut_decode(const DecodeEntry& entry, const DecodeNumbers& n, const DecodeBatch& b, const View& work) {
  const decode::Batch batch = batch_of(b, n);
  const int device = static_cast<int>(b.lengths.device());
  const DeviceGuard guard(device);
  launch_cut(entry, n, batch, work_of(entry, n, work, b.lengths), device);
}

Tensor run_decode(const DecodeEntry& entry, const DecodeNumbers& n, const DecodeTensors& t) {
  decode::DecodeParams p{};
  const View given(t.q), q = rows_of(given, "q"), lengths(t.lengths), k(t.k);
  const int64_t sequences = lengths.numel(), head_dim = entry.head_dim;
  static_cast<decode::Paged&>(p) = paged_of({k, t.v, view_of(t.k_token), view_of(t.v_page), view_of(t.k_descale),
                                             view_of(t.v_descale), n.k_descale, n.v_descale, view_of(t.page_table)},
                                            sequences, head_dim, q);
  const DecodeBatch b{lengths, view_of(t.cu_q), q.size(0), room_of(p), q.size(1), k.size(2)};
  p.batch = batch_of(b, n);

  const bool bf16 = q.scalar_type() == ScalarType::BFloat16;
  require(bf16 || q.scalar_type() == ScalarType::Half, "q must be bfloat16 or float16");
  require_same_device(q, "q", lengths);
  require_shape(q, "q", {b.total_q, b.heads, head_dim});
  p.q = q.data(), p.q_bf16 = bf16 ? 1 : 0;
  row_steps(q, "q", 8, p.q_row, p.q_head);
  for (const int64_t step : {p.q_row, p.q_head})
    require(step >= 0 && step < int64_t{1} << 32, "a tensor of the call has a stride of ", step, ", which is too far");
  if (t.sinks) set_sinks(p, *t.sinks, b, q);
  p.scale = static_cast<float>(n.scale), p.softcap = static_cast<float>(n.softcap);
  require(std::isfinite(p.scale), "scale must be finite in float32, got ", n.scale);
  require(std::isfinite(p.softcap) && p.softcap >= 0, "softcap must be finite and at least 0, got ", n.softcap);
  if (t.lse) {
    const View lse(*t.lse);
    require_shape(lse, "lse", {b.heads, b.total_q});
    p.lse = float_pointer(lse, "lse", q);
  }

  const int device = static_cast<int>(q.device());
  const DeviceGuard guard(device);
  const int64_t step = b.heads * head_dim;
  const int32_t type = type_of(bf16 ? OutType::bf16 : OutType::fp16);
  const Tensor result = t.out              ? empty<1>(q, byte_type(), {0}, {1})
                        : given.dim() == 4 ? empty<4>(q, type, {given.size(0), given.size(1), b.heads, head_dim},
                                                      {given.size(1) * step, step, head_dim, 1})
                                           : empty<3>(q, type, {b.total_q, b.heads, head_dim}, {step, head_dim, 1});
  const View out = rows_of(t.out ? *t.out : result, "out");
  require(out.scalar_type() == q.scalar_type(), "out must have q's type");
  require_same_device(out, "out", q);
  require_shape(out, "out", {b.total_q, b.heads, head_dim});
  p.o = out.data();
  row_steps(out, "out", 16, p.o_row, p.o_head);

  int64_t pieces[3];
  std::optional<Tensor> made;  // lives until both kernels are in the stream
  if (!t.work) made = empty<1>(q, byte_type(), {work_bytes(entry, n.ctas, pieces)}, {1});
  const Work work = work_of(entry, n, View(made ? *made : *t.work), q);
  if (made) launch_cut(entry, n, p.batch, work, device);
  p.ctas = work.ctas, p.cuts = work.cuts, p.arrived = work.arrived, p.parts = work.parts;
  void* arguments[] = {&p};
  check_launch(start_beside(kernel_of(entry, device), {work.ctas, entry.threads, entry.smem_bytes}, arguments,
                            current_stream(device), context_id(), device),
               entry.id, device);
  return result;
}

}  // namespace fp8cutlass
