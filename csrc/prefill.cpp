#include "prefill.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "copies.h"
#include "device.h"
#include "fp8cutlass/prefill/params.h"
#include "fp8cutlass/walk/ragged_sizes.h"
#include "kernels.h"
#include "launch.h"
#include "launch_pack.h"
#include "pack_arguments.h"
#include "ragged.h"
#include "start.h"
#include "workspace.h"

namespace fp8cutlass {

namespace {

constexpr int64_t kWord = sizeof(int);
constexpr int64_t kMost = int64_t{1} << 30;  // keys, and sequences

// Where all that the kernels hand to one another lies, from multiples of 256 bytes on.
struct Room {
  Room(int64_t most, int64_t capacity, int64_t kv_heads, int64_t head_dim, int64_t plan_words, int64_t q_rows)
      : columns(ragged_columns(capacity, most, prefill::kBlock)), blocks(columns / prefill::kBlock) {
    k = layout.add(kv_heads * columns * head_dim), v = layout.add(kv_heads * columns * head_dim);
    k_scales = layout.add(kv_heads * blocks * kWord), v_scales = layout.add(kv_heads * blocks * kWord);
    plan = layout.add(plan_words * kWord);
    count = layout.add(kWord), sequence = layout.add(most * kWord), first = layout.add(most * kWord);
    cu_q = layout.add((most + 1) * kWord), used_q = layout.add(most * kWord), cu_k = layout.add((most + 1) * kWord);
    q = layout.add(q_rows * head_dim), q_scales = layout.add(q_rows * kWord);
  }
  int64_t columns, blocks;
  int64_t k, v, k_scales, v_scales, plan, count, sequence, first, cu_q, used_q, cu_k, q, q_scales;
  Layout layout;
};

void launch_route(const prefill::RouteParams& p, int device, cudaStream_t stream) {
  prefill::RouteParams params = p;
  void* arguments[] = {&params};
  const LaunchShape shape{1, prefill::kRouteThreads, prefill::kRouteBytes};
  check_launch(start(kernel_of(Single::route, device), shape, arguments, stream, context_id()), "route", device);
}

void launch_gather(const PackEntry& pack, const prefill::GatherParams& p, int64_t blocks, int device,
                   cudaStream_t stream) {
  prefill::GatherParams params = p;
  void* arguments[] = {&params};
  const int64_t ctas = std::min(2 * blocks * p.kv_heads, int64_t{sm_count(device)} * prefill::kGatherCtas);
  const LaunchShape shape{ctas, kPackThreads, pack.stage_bytes};
  check_launch(start(kernel_of(pack, kPackGather, device), shape, arguments, stream, context_id()), pack.id, device);
}

}  // namespace

void prefill_pages(const VariantEntry& variant, const DecodeNumbers& n, const PrefillArguments& a) {
  const int64_t sequences = a.lengths.numel(), head_dim = variant.head_dim;
  require(a.q.dim() == 3, "q must have 3 dimensions, got shape ", shape_text(a.q));
  prefill::GatherParams gather{};
  static_cast<decode::Paged&>(gather) = paged_of(a.pages, sequences, head_dim, a.q);
  const int64_t tokens = a.q.size(0), heads = a.q.size(1);
  const DecodeBatch b{a.lengths, a.cu_q, tokens, room_of(gather), heads, a.pages.k.size(2)};
  prefill::RouteParams route{};
  route.batch = batch_of(b, n);
  route.batch.routed = 0;  // it is chosen here what is
  require(variant.ragged && variant.key_block == prefill::kBlock, "variant ", variant.id,
          " takes no ragged batch whose blocks have ", prefill::kBlock, " keys");
  require(a.q.scalar_type() == ScalarType::BFloat16 || a.q.scalar_type() == ScalarType::Half,
          "q must be bfloat16 or float16");
  require_same_device(a.q, "q", b.lengths);
  require_shape(a.q, "q", {tokens, heads, head_dim});
  require(a.least > 0 && a.least < kMost, "least must be positive, got ", a.least);
  require(a.most > 0 && a.most <= sequences, "most is ", a.most, ", there are ", sequences, " sequences");
  require(a.capacity > 0 && a.capacity < kMost, "capacity is ", a.capacity, ", outside of 1..2^30");
  const PackEntry& copies = find_copies(variant);
  require(copies.ragged, "pack kernel ", copies.id, " takes no pages");
  const int device = static_cast<int>(a.q.device());

  const View q_rows = a.q.permuted({View::kNew, 1, 0, 2});  // (1, heads, tokens, D)
  const bool leave_q = variant.quantises_q && can_be_mapped(q_rows, "q");
  const int64_t words = plan_words(tokens, a.most, variant);
  const Room room(a.most, a.capacity, b.kv_heads, head_dim, words, leave_q ? 0 : heads * tokens);
  const Tensor workspace = empty<1>(a.q, byte_type(), {room.layout.total()}, {1});
  auto* const base = static_cast<uint8_t*>(workspace.data_ptr());
  const auto ints = [&](int64_t at) { return reinterpret_cast<int*>(base + at); };
  const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(base + at); };
  const auto view = [&](int64_t at, ScalarType type, std::initializer_list<int64_t> sizes) {
    return View(base + at, type, device, sizes);
  };

  route.least = int(a.least), route.capacity = int(a.capacity);
  route.members = {ints(room.count),  ints(room.sequence), ints(room.first), ints(room.cu_q),
                   ints(room.used_q), ints(room.cu_k),     int(a.most)};
  route.lengths = int_pointer(a.rest, "rest", a.q, {sequences});
  gather.members = route.members, gather.lengths = route.lengths;
  gather.kv_heads = route.batch.kv_heads, gather.columns = to_int(room.columns, "the keys of all blocks");
  gather.k_out = base + room.k, gather.v_out = base + room.v;
  gather.k_scales = floats(room.k_scales), gather.v_scales = floats(room.v_scales);

  PackArguments packing{};
  std::optional<View> q_descale;
  std::optional<QuerySource> source;
  View q = a.q;
  if (leave_q) {
    source = QuerySource{a.score_amax, n.scale < 0, true};  // it is the plan, launched in order
  } else {
    const View q_made = view(room.q, ScalarType::Byte, {heads, tokens, head_dim});
    q = q_made.permuted({1, 0, 2}), q_descale = view(room.q_scales, ScalarType::Float, {1, heads, tokens});
    packing.key_block = variant.key_block;
    packing.q = q_rows, packing.q8 = q_made.permuted({View::kNew, 0, 1, 2}), packing.q_descale = q_descale;
    packing.q_granularity = static_cast<int64_t>(Granularity::token);
    packing.score_amax = a.score_amax, packing.negate_q = n.scale < 0;
  }
  ForwardParams params = ragged_params(
      {q, view(room.k, ScalarType::Byte, {b.kv_heads, room.columns, head_dim}).permuted({1, 0, 2}),
       view(room.v, ScalarType::Byte, {b.kv_heads, head_dim, room.columns}), q_descale,
       view(room.k_scales, ScalarType::Float, {1, b.kv_heads, room.blocks}),
       view(room.v_scales, ScalarType::Float, {1, b.kv_heads, room.blocks}),
       view(room.cu_q, ScalarType::Int, {a.most + 1}), view(room.cu_k, ScalarType::Int, {a.most + 1}),
       view(room.used_q, ScalarType::Int, {a.most}), std::nullopt, view(room.plan, ScalarType::Int, {words}), a.out,
       a.lse, std::abs(n.scale), n.left, n.right, true, true, source},
      variant);
  params.ragged.key_tokens = route.capacity;

  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  launch_route(route, device, stream);
  launch_gather(copies, gather, room.blocks, device, stream);
  if (!leave_q) launch(find_pack(packing), pack_params(packing), device, stream);
  launch(variant, params, device, stream);
}

}  // namespace fp8cutlass
