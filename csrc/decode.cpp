#include "decode.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "device.h"
#include "fp8cutlass/decode/params.h"
#include "kernels.h"
#include "pages.h"
#include "start.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kCutWords = sizeof(decode::Cut) / sizeof(int);

// A window's end, so far that adding it to any position stays within 32 bits.
int window_end(int64_t keys) { return static_cast<int>(std::clamp<int64_t>(keys, 0, decode::kFar)); }

}  // namespace

decode::Batch batch_of(const DecodeBatch& b) {
  decode::Batch batch{};
  require(b.lengths.is_cuda(), "cache_seqlens is not on a card");
  const int64_t sequences = b.lengths.numel();
  batch.lengths = int_pointer(b.lengths, "cache_seqlens", b.lengths, {sequences});
  require(b.kv_heads > 0 && b.heads > 0 && b.heads % b.kv_heads == 0, "q has ", b.heads,
          " heads, which is no multiple of the cache's ", b.kv_heads);
  require(sequences > 0, "cache_seqlens has no sequence");
  batch.cu_q = int_pointer(b.cu_q, "cu_seqlens_q", b.lengths, {sequences + 1});
  batch.total_q = to_int(b.total_q, "the queries"), batch.sequences = to_int(sequences, "the number of sequences");
  require(b.most_keys >= 0 && b.most_keys < decode::kFar, "the page table has room for ", b.most_keys, " keys");
  require(b.total_q * b.heads < decode::kFar, "q has ", b.total_q, " rows of ", b.heads, " heads: too many");
  batch.most_keys = static_cast<int>(b.most_keys);
  batch.heads = to_int(b.heads, "the number of heads"), batch.kv_heads = to_int(b.kv_heads, "that of the cache");
  batch.by_group = decode::divisor(batch.heads / batch.kv_heads), batch.by_kv_heads = decode::divisor(batch.kv_heads);
  batch.left = window_end(b.left), batch.right = window_end(b.right);
  batch.routed = b.routed ? 1 : 0;
  return batch;
}

namespace {

int set_work(const DecodeWork& work, const View& like, decode::Cut*& cuts, unsigned*& arrived) {
  const int64_t ctas = work.arrived.numel();
  require(ctas > 0, "arrived has no entry");
  arrived = reinterpret_cast<unsigned*>(int_pointer(work.arrived, "arrived", like, {ctas}));
  cuts = reinterpret_cast<decode::Cut*>(int_pointer(work.cuts, "cuts", like, {ctas + 1, kCutWords}));
  require_aligned(cuts, "cuts");
  return to_int(ctas, "the CTAs");
}

// Strides of (tokens, heads, D) in elements, for accesses of so many bytes.
void row_steps(const View& tensor, const char* name, int64_t bytes, int64_t& row, int64_t& head) {
  require(tensor.stride(2) == 1, name, " must be contiguous in its last dimension");
  row = tensor.size(0) == 1 ? 0 : tensor.stride(0), head = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  const bool whole = row * tensor.element_size() % bytes == 0 && head * tensor.element_size() % bytes == 0;
  require(row >= 0 && head >= 0 && whole && reinterpret_cast<uintptr_t>(tensor.data()) % bytes == 0, name,
          " must have rows that begin on multiples of ", bytes, " bytes");
}

}  // namespace

void cut_decode(const DecodeEntry& entry, const DecodeBatch& b, const DecodeWork& work, int64_t overhead, bool share) {
  decode::CutParams p{};
  p.batch = batch_of(b);
  p.ctas = set_work(work, b.lengths, p.cuts, p.arrived);
  p.rows = entry.rows, p.tile = entry.tile, p.whole = share ? 0 : 1;
  require(overhead > 0, "a unit's overhead must be positive, got ", overhead);
  p.overhead = to_int(overhead, "the overhead");
  const int device = static_cast<int>(b.lengths.device());
  const DeviceGuard guard(device);
  void* arguments[] = {&p};
  const LaunchShape shape{1, decode::kCutThreads, decode::kCutBytes};
  check_launch(start(cut_kernel(device), shape, arguments, current_stream(device), context_id()), "cut", device);
}

void run_decode(const DecodeEntry& entry, const DecodeBatch& b, const DecodeWork& work, const DecodeArguments& a) {
  decode::DecodeParams p{};
  p.batch = batch_of(b);
  decode::Cut* cuts = nullptr;
  const int ctas = set_work(work, a.q, cuts, p.arrived);
  p.cuts = cuts, p.ctas = ctas;
  const int64_t sequences = b.lengths.numel(), head_dim = entry.head_dim;
  const bool bf16 = a.q.scalar_type() == ScalarType::BFloat16;
  require(bf16 || a.q.scalar_type() == ScalarType::Half, "q must be bfloat16 or float16");
  require_same_device(a.q, "q", b.lengths);
  require_shape(a.q, "q", {b.total_q, b.heads, head_dim});
  p.q = a.q.data(), p.q_bf16 = bf16 ? 1 : 0;
  row_steps(a.q, "q", 8, p.q_row, p.q_head);

  static_cast<decode::Paged&>(p) = paged_of(a.pages, sequences, b.kv_heads, head_dim, b.most_keys, a.q);
  for (const int64_t step : {p.q_row, p.q_head})
    require(step >= 0 && step < int64_t{1} << 32, "a tensor of the call has a stride of ", step, ", which is too far");

  if (a.sinks) {
    p.sinks = float_pointer(*a.sinks, "sinks", a.q);
    if (a.sinks->dim() == 1) {
      require_shape(*a.sinks, "sinks", {b.heads});
      p.sink_head = 1;
    } else {
      require_shape(*a.sinks, "sinks", {b.heads, b.total_q});
      p.sink_head = b.total_q, p.sink_token = 1;
    }
  }
  p.scale = static_cast<float>(a.scale), p.softcap = static_cast<float>(a.softcap);
  require(std::isfinite(p.scale), "scale must be finite in float32, got ", a.scale);
  require(std::isfinite(p.softcap) && p.softcap >= 0, "softcap must be finite and at least 0, got ", a.softcap);
  require(a.out.scalar_type() == a.q.scalar_type(), "out must have q's type");
  require_same_device(a.out, "out", a.q);
  require_shape(a.out, "out", {b.total_q, b.heads, head_dim});
  p.o = a.out.data();
  row_steps(a.out, "out", 16, p.o_row, p.o_head);
  if (a.lse) {
    require_shape(*a.lse, "lse", {b.heads, b.total_q});
    p.lse = float_pointer(*a.lse, "lse", a.q);
  }
  require_shape(a.parts, "parts", {ctas, 2, entry.part_floats});
  p.parts = float_pointer(a.parts, "parts", a.q);
  require_aligned(p.parts, "parts");

  const int device = static_cast<int>(a.q.device());
  const DeviceGuard guard(device);
  void* arguments[] = {&p};
  cudaLaunchAttribute beside = runs_beside();
  const int attributes = capability_of(device).major >= 9 ? 1 : 0;
  check_launch(start(kernel_of(entry, device), {ctas, entry.threads, entry.smem_bytes}, arguments,
                     current_stream(device), context_id(), &beside, attributes),
               entry.id, device);
}

}  // namespace fp8cutlass
