// What launches ask of the driver, and with what shapes and parameters they launch, with a stand-in for driver and
// runtime. Prints one line a property; exits non-zero if any fails. Built by tests/native/test_launch_host.py with the
// sources of csrc/ that launch, which puts files of cubins beside the program.
#include "launch.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "counters.h"
#include "fp8cutlass/sm90/resident_params.h"
#include "kernels.h"
#include "launch_pack.h"
#include "launch_resident.h"
#include "runtime.h"

namespace fp8cutlass {

// A registry in small: a kernel of family sm90a for head_dim 64, and what is different in others.
constexpr VariantEntry kernel(const char* id) {
  VariantEntry v{};
  v.id = id, v.family = Family::sm90a;
  v.head_dim = v.tile_m = v.tile_n = v.slot_keys = 64;
  v.threads = 256, v.smem_bytes = 60000, v.ctas_per_sm = v.parts = v.split = 1;
  v.mask = Mask::full, v.out = OutType::bf16, v.q = Granularity::token, v.k = v.v = Granularity::block;
  v.key_block = 128, v.coarse = true;
  return v;
}

template <class Change>
constexpr VariantEntry kernel(const char* id, const Change& change) {
  VariantEntry v = kernel(id);
  change(v);
  return v;
}

constexpr auto kWarp = [](VariantEntry& v) {
  v.family = Family::sm89, v.threads = 128, v.smem_bytes = 40000, v.ctas_per_sm = 2;
};
constexpr auto kWindow = [](VariantEntry& v) {
  v.tile_m = 128, v.threads = 384, v.mask = Mask::window, v.quantises_q = true;
};

const VariantEntry kVariants[] = {
    kernel("plain", [](VariantEntry& v) { v.quantises_q = true; }),
    kernel("other"),
    kernel("wide",
           [](VariantEntry& v) {
             v.head_dim = 192, v.tile_m = 128, v.tile_n = 256, v.slot_keys = 128, v.threads = 384;
             v.smem_bytes = 200000, v.parts = 3, v.split = 4, v.mask = Mask::causal, v.key_block = 256;
           }),
    kernel("unrolled",
           [](VariantEntry& v) { v.unrolled[0] = {65, 128, false}, v.unrolled[1] = {193, 250, true}, v.plain = true; }),
    kernel("walks", [](VariantEntry& v) { v.draws = v.ragged = true; }),
    kernel("window", kWindow),
    kernel("window_walks", [](VariantEntry& v) { kWindow(v), v.draws = v.ragged = true; }),
    kernel("warp", kWarp),
    kernel("warp_large", [](VariantEntry& v) { kWarp(v), v.smem_bytes = 60000, v.ctas_per_sm = 1; }),
    kernel("absent", kWarp),
    kernel("warp_late", kWarp),
    kernel("biased", [](VariantEntry& v) { kWindow(v), v.biased = true; }),
    kernel("warp_biased", [](VariantEntry& v) { kWarp(v), v.mask = Mask::window, v.biased = true; }),
};
const int kVariantCount = 13;
const PackEntry kPacks[] = {{"pack", 64, 128, SourceType::bf16, 128, 1, 8000, 256, 50176, 3, true, false},
                            {"halved", 256, 256, SourceType::bf16, 128, 2, 33000, 0, 0, 0, true, false},
                            {"narrow", 32, 128, SourceType::bf16, 128, 1, 4000, 0, 0, 0, false, false},
                            {"copies", 64, 128, SourceType::fp8, 128, 1, 8448, 0, 0, 0, true, false}};
const int kPackCount = 4;
const DecodeEntry kDecodes[] = {{"decode_d64", "sm90a", 64, 8, 128, 128, 70000, 2, 528}};
const int kDecodeCount = 1;
const ResidentEntry kResidents[] = {{"keeps", SourceType::bf16, 64, 256, 128, 384, 50000, 2}};
const int kResidentCount = 1;
// The last three have files that are not what they should be.
const TargetEntry kTargets[] = {{"sm90a", 9, 0}, {"other", 9, 1}, {"stale", 9, 2}, {"missing", 9, 3}, {"short", 9, 4}};
const int kTargetCount = 5;
const char kManifest[] = "";

static unsigned counted = 0;
WorkCounters work_counters(int, cudaStream_t, bool) {
  ++counted;
  return {};
}

}  // namespace fp8cutlass

using namespace fp8cutlass;

static int failures = 0;
static void report(bool ok, const char* what) {
  std::printf("%s %s\n", ok ? "ok" : "FAILED", what);
  failures += !ok;
}

static const VariantEntry& variant(const std::string& id) {
  for (int i = 0; i < kVariantCount; ++i) {
    if (kVariants[i].id == id) return kVariants[i];
  }
  std::abort();
}

// Launches, and returns what was said where that failed.
static std::string run(ForwardParams p, const char* id = "plain", int device = 0) {
  try {
    launch(variant(id), p, device, nullptr);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

static std::string run_pack(const PackEntry& pack, const PackParams& p) {
  try {
    launch(pack, p, 0, nullptr);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

static const runtime::Launch& last() { return runtime::launches.back(); }

static bool says(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// What the launch got is what the driver makes of these parameters when it is asked: nothing of an earlier launch.
static bool fresh(const ForwardParams& p) {
  CUtensorMap q, k, v;
  const bool fp8 = p.query.type == QueryType::fp8;
  const cuuint64_t qd[] = {fp8 ? 64 : 2 * cuuint64_t(p.query.columns), cuuint64_t(p.seqlen_q), cuuint64_t(p.heads),
                           cuuint64_t(p.batch)};
  const cuuint64_t kd[] = {64, cuuint64_t(p.seqlen_k), cuuint64_t(p.kv_heads), cuuint64_t(p.batch)};
  const cuuint64_t vd[] = {cuuint64_t(p.seqlen_k_padded), 64, cuuint64_t(p.batch) * p.kv_heads};
  const cuuint64_t qs[] = {cuuint64_t(p.q_stride_row), cuuint64_t(p.q_stride_head), cuuint64_t(p.q_stride_batch)};
  const cuuint64_t ks[] = {cuuint64_t(p.k_stride_row), cuuint64_t(p.k_stride_head), cuuint64_t(p.k_stride_batch)};
  const cuuint64_t vs[] = {vd[0], vd[0] * 64};
  const cuuint32_t boxes[2][4] = {{64, 64, 1, 1}, {128, 64, 1, 1}};
  const auto make = [&](CUtensorMap& map, int rank, const uint8_t* base, const cuuint64_t* d, const cuuint64_t* s,
                        bool wide = false) {
    const cuuint32_t* const box = boxes[wide];
    runtime::encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, const_cast<uint8_t*>(base), d, s, box, nullptr,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    --runtime::encoded;
  };
  make(q, 4, p.q, qd, qs, !fp8), make(k, 4, p.k, kd, ks), make(v, 3, p.v, vd, vs);
  const auto& got = last().params<sm90::KernelParams>();
  return std::memcmp(&got.q, &q, sizeof(q)) == 0 && std::memcmp(&got.k, &k, sizeof(k)) == 0 &&
         std::memcmp(&got.v, &v, sizeof(v)) == 0;
}

static ForwardParams problem() {
  ForwardParams p{};
  p.q = reinterpret_cast<const uint8_t*>(0x100000), p.k = reinterpret_cast<const uint8_t*>(0x200000);
  p.v = reinterpret_cast<const uint8_t*>(0x300000);
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.seqlen_q = 100, p.seqlen_k = 90, p.seqlen_k_padded = 128;
  p.q_stride_row = 64, p.q_stride_head = 6400, p.q_stride_batch = 25600;
  p.k_stride_row = 64, p.k_stride_head = 5760, p.k_stride_batch = 11520;
  return p;
}

static void check_maps() {
  using runtime::encoded, runtime::opted_in;
  const ForwardParams base = problem();
  report(run(base).empty() && fresh(base) && encoded == 3 && opted_in == 1, "a first launch encodes and opts in");
  report(run(base).empty() && fresh(base) && encoded == 3 && opted_in == 1, "the same again does neither");
  run(base, "other");
  report(encoded == 3 && opted_in == 2, "another kernel opts in");

  bool right = true;
  int changes = 0;
  const auto changed = [&](auto change) {
    ForwardParams p = base;
    change(p);
    const int before = encoded;
    right = run(p).empty() && fresh(p) && encoded > before && right;
    right = run(base).empty() && fresh(base) && right;  // and back
    ++changes;
  };
  changed([](ForwardParams& p) { p.q += 4096; });
  changed([](ForwardParams& p) { p.k += 4096; });
  changed([](ForwardParams& p) { p.v += 4096; });
  changed([](ForwardParams& p) { p.batch = 1; });
  changed([](ForwardParams& p) { p.heads = 2; });
  changed([](ForwardParams& p) { p.seqlen_q = 99; });
  changed([](ForwardParams& p) { p.seqlen_k = 89; });
  changed([](ForwardParams& p) { p.seqlen_k_padded = 256; });
  changed([](ForwardParams& p) { p.q_stride_row = 128; });
  changed([](ForwardParams& p) { p.q_stride_head = 12800; });
  changed([](ForwardParams& p) { p.k_stride_batch = 23040; });
  changed([](ForwardParams& p) { p.k = p.q, p.k_stride_row = 256; });  // at an address that another tensor had
  changed([](ForwardParams& p) { p.query.type = QueryType::bf16, p.query.columns = 64; });
  changed([](ForwardParams& p) { p.query.type = QueryType::fp16, p.query.columns = 56; });  // narrower than the tile
  report(right && changes == 14, "whatever a map is made of makes another one");

  const int encoded_before = encoded, opted_before = opted_in;
  runtime::context = 8;
  report(run(base).empty() && encoded == encoded_before + 3 && opted_in == opted_before + 1,
         "another context encodes and opts in anew");
  runtime::context = 0;
  run(base), run(base);
  report(encoded == encoded_before + 9 && opted_in == opted_before + 3, "without a context nothing is kept");
  runtime::context = 8;
  std::thread([&] { run(base); }).join();
  report(encoded == encoded_before + 12 && opted_in == opted_before + 4 && fresh(base),
         "a thread relies on nothing that another one did");

  ForwardParams bad = base;
  bad.k = reinterpret_cast<const uint8_t*>(0x400000);
  runtime::refused = bad.k;
  report(!run(bad).empty() && !run(bad).empty(), "a refusal is not kept");
  runtime::refused = nullptr;
  report(run(bad).empty() && fresh(bad), "nor held against the next");
  ForwardParams half = base;
  half.query.type = QueryType::bf16, half.query.columns = 64;
  report(!run(half, "other").empty(), "Q in 16 bits goes to kernels alone that take it");
}

static void check_masks() {
  ForwardParams p = problem();
  int words[2] = {};
  MaskParams mask{};
  mask.lists.tiles = words, mask.lists.counts = words + 1, mask.lists.key_tiles = 7;
  launch(variant("plain"), p, 0, nullptr, mask);
  const auto& listed_params = last().params<sm90::KernelParams>();
  const TileMask& got = listed_params.mask;
  report(got.tiles == words && got.counts == words + 1 && got.key_tiles == 7 && listed_params.bias.data == nullptr,
         "lists of a mask come to the kernel, without a bias");
  VariantEntry listed = variant("plain");
  listed.mask = Mask::blocks;
  std::string refused;
  try {
    launch(listed, p, 0, nullptr);
  } catch (const std::exception& error) {
    refused = error.what();
  }
  report(says(refused, "needs a mask"), "a kernel of lists without them is refused");
}

static void check_biases() {
  ForwardParams p = problem();
  const float values[1] = {};
  MaskParams mask{};
  Bias& bias = mask.bias;
  bias.data = values, bias.stride_batch = 11, bias.stride_head = 22, bias.stride_row = 33, bias.stride_key = 44;
  bias.type = BiasType::fp16, bias.pairs = bias.chunks = true;
  launch(variant("biased"), p, 0, nullptr, mask);
  const auto& params = last().params<sm90::KernelParams>();
  const Bias& got = params.bias;
  report(got.data == values && std::memcmp(&got, &bias, sizeof(bias)) == 0 && params.mask.tiles == nullptr,
         "a bias comes to the kernel with its strides and type, without lists");
  launch(variant("warp_biased"), p, 0, nullptr, mask);
  report(std::memcmp(&last().bias, &bias, sizeof(bias)) == 0 && last().second == 16 &&
             last().params<ForwardParams>().seqlen_k == 90 &&
             last().kernel->name == "_ZN10fp8cutlass11warp_biasedENS_13ForwardParamsEiNS_4BiasE",
         "and to one that gets pointers, behind its number of items");
  report(says(run(p, "biased"), "variant biased needs a bias"), "a kernel that adds one is refused without it");
  report(run(p).empty() && last().params<sm90::KernelParams>().bias.data == nullptr,
         "a kernel that adds none gets none, whatever was launched before");
}

static void check_windows() {
  const ForwardParams base = problem();
  run(base, "window");
  const auto& pairs = last().params<sm90::KernelParams>();
  report(pairs.p.item_rows == 64 && last().ctas == 8 && pairs.order.items == 8 && pairs.order.heads.divisor == 2,
         "a window: an item is half the rows of two heads that share K and V");
  report(pairs.q.opaque[8] == (uint64_t{64} << 32 | 64), "and Q is copied by the rows of one");
  ForwardParams alone = base;
  alone.heads = 2;
  run(alone, "window");
  const auto& whole = last().params<sm90::KernelParams>();
  report(whole.p.item_rows == 128 && last().ctas == 4 && whole.q.opaque[8] == (uint64_t{64} << 32 | 64),
         "without such a pair it is a tile of one, copied in two halves");
  ForwardParams batch = base;
  batch.batch = 1, batch.seqlen_q = 500, batch.ragged.most = 10, batch.ragged.sequences = 3, batch.ragged.early = 1;
  const size_t before = runtime::launches.size();
  run(batch, "window_walks");
  const runtime::Launch& plan = runtime::launches[before];
  report(last().ctas == 20 && last().params<sm90::KernelParams>().p.item_rows == 64 &&
             plan.params<planning::PlanParams>().tile_m == 64,
         "in a ragged batch as well, and the plan lists as many rows");
  report(plan.dependent && last().dependent, "a plan whose lengths are there begins beside the kernel before");
}

static void check_residents() {
  ResidentParams r{};
  r.p = problem();
  r.p.query.columns = 64;
  r.v_stride_row = 128, r.v_stride_head = 0, r.v_stride_batch = 11520;
  const auto& got = [&](ResidentForm form) -> const ResidentParams& {
    launch(kResidents[0], form, r, 0, nullptr);
    return last().params<sm90::ResidentLaunch>().params;
  };
  const ResidentParams few = got(kResidentFull);  // 4 heads of K and V, 4 row tiles of 2 query heads each
  report(few.head_tiles == 4 && few.item_tiles == 2 && few.by_head_items.divisor == 2 && few.items == 8 &&
             last().ctas == 8 && last().threads == 384 && last().smem_bytes == 50000 && !last().dependent,
         "few heads: cut into as many items as warpgroups can share");
  const auto& maps = last().params<sm90::ResidentLaunch>();
  report(maps.q.opaque[8] == (uint64_t{128} << 32 | 64) && maps.k.opaque[8] == (uint64_t{128} << 32 | 128) &&
             maps.v.opaque[8] == maps.k.opaque[8] && maps.k_head_step == 1 && maps.v_head_step == 0,
         "Q is copied by row tiles, K and V by blocks; heads of V that are one");
  report(last().kernel->library == "keeps" &&
             last().kernel->name == "_ZN10fp8cutlass10keeps_fullENS_4sm9014ResidentLaunchE",
         "the kernel of a mask in its source's cubin");
  r.p.batch = 200;
  const ResidentParams many = got(kResidentCausal);
  report(many.item_tiles == 4 && many.by_head_items.divisor == 1 && many.items == 400 && last().ctas == 264 &&
             last().kernel->name == "_ZN10fp8cutlass12keeps_causalENS_4sm9014ResidentLaunchE",
         "many heads: an item is all that share one of K and V, and CTAs take several");
  r.p.batch = 135;
  const ResidentParams rest = got(kResidentFull);  // 270 heads
  report(rest.whole == 264 && rest.item_tiles == 2 && rest.by_head_items.divisor == 2 && rest.items == 276,
         "six heads that are left: cut, as few heads are");
  r.p.batch = 2, r.p.seqlen_q = 64 * 1000;
  const ResidentParams longer = got(kResidentFull);  // 2000 row tiles of a head, 264 CTAs for 4 heads
  report(longer.item_tiles == 32 && longer.by_head_items.divisor == 63 && longer.items == 252 && last().ctas == 252,
         "long queries on few heads: no more items than CTAs");
}

// Sequences and heads of a ragged batch are items, which CTAs draw.
static void check_ragged_residents() {
  ResidentParams r{};
  r.p = problem();
  r.p.query.columns = 64;
  r.v_stride_row = 128;
  r.p.batch = 1, r.p.heads = 8, r.p.kv_heads = 2, r.p.seqlen_q = 6400, r.p.seqlen_k = 5000;
  const auto& got = [&](int sequences) -> const ResidentParams& {
    r.p.ragged.sequences = sequences;
    launch(kResidents[0], kResidentRaggedCausal, r, 0, nullptr);
    return last().params<sm90::ResidentLaunch>().params;
  };
  const unsigned before = counted;
  const ResidentParams few = got(4);  // 25 row tiles each, 4 query heads on each of 8 heads of K and V; 264 CTAs
  report(few.group == 4 && few.by_group.divisor == 4 && few.by_kv_heads.divisor == 2 &&
             few.by_head_items.divisor == 33 && few.items == 264 && last().ctas == 264 && counted == before &&
             last().kernel->name == "_ZN10fp8cutlass19keeps_ragged_causalENS_4sm9014ResidentLaunchE",
         "few sequences: cut, so that each CTA has a part; there is nothing to draw");
  const ResidentParams some = got(100);  // a row tile of 4 heads: as many parts as twice that
  report(some.by_head_items.divisor == 1 && some.items == 200 && last().ctas == 200,
         "a part has at least a row tile on average");
  const ResidentParams many = got(400);
  report(many.by_head_items.divisor == 1 && many.items == 800 && last().ctas == 264 && counted == before + 1,
         "many: they are drawn from counters");
  r.p.seqlen_q = 150 * 640;
  report(got(150).by_head_items.divisor == 3 && last().params<sm90::ResidentLaunch>().params.items == 900,
         "many long ones: cut, so that one that is longer keeps nobody waiting");
}

static void check_shapes() {
  const ForwardParams base = problem();  // 16 items
  run(base);
  const runtime::Launch one = last();
  report(one.ctas == 16 && one.threads == 256 && one.smem_bytes == 60000 && one.dependent && one.cluster == 1,
         "a small problem: a CTA an item, allowed to begin early");
  report(one.kernel->library == "plain" && one.kernel->name == "_ZN10fp8cutlass5plainENS_4sm9012KernelParamsE",
         "the kernel of that name in its own cubin");
  ForwardParams large = base;
  large.seqlen_q = 64 * 100;
  run(large);
  report(last().ctas == 132 && last().params<sm90::KernelParams>().order.items == 800,
         "a large one: a CTA a multiprocessor");

  ForwardParams wide = base;
  wide.lse = reinterpret_cast<float*>(0x900000), wide.seqlen_k = 300, wide.seqlen_k_padded = 384;
  wide.q_stride_row = wide.k_stride_row = 192;
  report(run(wide, "wide").empty(), "a cluster is launched");
  const auto& got = last().params<sm90::KernelParams>();
  report(last().ctas == 8 * 4 && last().cluster == 4 && last().threads == 384 && last().dependent,
         "split keys: a cluster an item");
  // The maps' last words are box and swizzle: Q 4 + 3 words before it, V 3 + 2.
  report(got.q.opaque[8] == (uint64_t{64} << 32 | 128) && got.k.opaque[8] == (uint64_t{64} << 32 | 128) &&
             got.v.opaque[6] == (uint64_t{128} << 32 | 64) && got.v.opaque[2] == 192,
         "boxes: a slot's keys of K, a part's columns of V");
  report(got.want_lse == 1 && one.params<sm90::KernelParams>().want_lse == 0 && got.q_head_step == 1,
         "an LSE is wanted where there is room for it");
  ForwardParams shared = base;
  shared.k_stride_head = shared.q_stride_batch = 0;
  run(shared);
  const auto& steps = last().params<sm90::KernelParams>();
  report(steps.k_head_step == 0 && steps.k_batch_step == 1 && steps.q_batch_step == 0 && steps.k.opaque[3] == 1,
         "an expanded dimension has size 1 and step 0");

  const std::string names[] = {"_plain", "_keys128", "_keys128", "_plain", "_plain", "_keys250", "_keys250", "_plain"};
  const int keys[] = {64, 65, 128, 129, 192, 193, 250, 251};
  bool right = true;
  for (int i = 0; i < 8; ++i) {
    ForwardParams p = base;
    p.seqlen_k = keys[i], p.seqlen_k_padded = 256;
    run(p, "unrolled");
    const std::string name = "unrolled" + names[i];
    right = right &&
            last().kernel->name == "_ZN10fp8cutlass" + std::to_string(name.size()) + name + "ENS_4sm9012KernelParamsE";
  }
  report(right, "the form for the number of keys");

  right = true;
  for (int more = 0; more < 3; ++more) {
    for (int i = 0; i < 8; ++i) {
      ForwardParams p = base;
      p.seqlen_k = keys[i], p.seqlen_k_padded = 256;
      float* const there = reinterpret_cast<float*>(0x900000);
      if (more == 0) p.lse = there, p.merge_lse = i % 2;
      if (more == 1) p.amax = there;
      if (more == 2) p.sinks = there;
      run(p, "unrolled");
      const std::string name = names[i] == "_keys128" ? "unrolled_keys128ENS" : "8unrolledENS";
      right = right && last().kernel->name.find(name) != std::string::npos;
    }
  }
  report(right, "a plain form runs no call that wants an LSE or amax, or has sinks");

  ForwardParams ragged = base;
  ragged.batch = 1, ragged.seqlen_q = 500, ragged.ragged.most = 10, ragged.ragged.sequences = 3;
  const size_t before = runtime::launches.size();
  const unsigned counted_before = counted;
  run(ragged, "walks");
  const runtime::Launch& plan = runtime::launches[before];
  const auto& planned = plan.params<planning::PlanParams>();
  report(runtime::launches.size() == before + 2 && last().ctas == 40 && counted == counted_before,
         "a ragged batch: a CTA for each item that there may be");
  report(plan.kernel->name == "_ZN10fp8cutlass8planning4planENS0_10PlanParamsE" && plan.kernel->library == "plan" &&
             plan.ctas == 1 && plan.threads == planning::kThreads && plan.smem_bytes == 0 && !plan.dependent &&
             planned.total_q == 500 && planned.tile_m == 64 && planned.key_block == 128 && planned.batch.sequences == 3,
         "the plan goes before it");
  ragged.ragged.most = 100;
  run(ragged, "walks");
  report(last().ctas == 132 && counted == counted_before + 1, "where more items than CTAs are left, they are drawn");
  check_residents();
  check_ragged_residents();
  check_windows();
  check_masks();
  check_biases();

  const int opted_before = runtime::opted_in;
  run(base, "warp");
  report(last().ctas == 16 && last().threads == 128 && last().smem_bytes == 40000 && last().second == 16 &&
             !last().dependent && runtime::opted_in == opted_before &&
             last().kernel->name == "_ZN10fp8cutlass4warpENS_13ForwardParamsEi" &&
             last().params<ForwardParams>().seqlen_k == 90,
         "a kernel that gets pointers");
  run(large, "warp");
  report(last().ctas == 264 && last().second == 800, "as many CTAs as are resident");
  run(base, "warp_large");
  report(runtime::opted_in == opted_before + 1, "which opts in as well");
  ForwardParams endless = base;
  endless.seqlen_k = INT32_MAX - 100;
  report(!run(endless).empty() && !run(endless, "warp").empty(), "numbers that do not fit 32 bits are refused");
  ForwardParams diagonal = base;
  diagonal.seqlen_q = diagonal.seqlen_k = INT32_MAX / 2;
  report(!run(diagonal, "wide").empty(), "so are diagonals");
}

static void check_packs() {
  PackParams p{};
  p.batch = 2, p.head_dim = 56;
  const int heads[] = {2, 2, 4}, tokens[] = {300, 300, 200};
  for (int i = 0; i < kPackOperands; ++i) {
    PackOperand& o = p.operand[i];
    o.x = reinterpret_cast<const void*>(0x500000 + 0x100000 * i);
    o.out = reinterpret_cast<uint8_t*>(uintptr_t(0x900000 + 0x100000 * i));
    o.heads = heads[i], o.tokens = tokens[i], o.rows = i == kPackV ? 384 : tokens[i];
    o.stride_row = 64, o.stride_head = 64 * 300, o.stride_batch = 64 * 300 * heads[i];
    o.granularity = i == kPackQ ? Granularity::token : Granularity::block;
  }
  size_t before = runtime::launches.size();
  report(run_pack(kPacks[0], p).empty() && runtime::launches.size() == before + 1, "blocks take one launch");
  const auto& got = last().params<PackParams>();
  report(last().ctas == 2 * (2 * 3 + 2 * 3 + 4 * 2) && last().threads == 256 && last().smem_bytes == 8000 &&
             got.operand[kPackV].blocks == 3 && got.operand[kPackQ].ctas == 16 &&
             last().kernel->name == "_ZN10fp8cutlass4packILb0EEEvNS_10PackParamsE",
         "a CTA for each block of each operand");
  p.operand[kPackK].amax = reinterpret_cast<float*>(0x800000);
  before = runtime::launches.size();
  run_pack(kPacks[0], p);
  const runtime::Launch& maxima = runtime::launches[before];
  report(runtime::launches.size() == before + 2 && maxima.ctas == 12 && maxima.smem_bytes == 0 && last().ctas == 40 &&
             maxima.kernel->name == "_ZN10fp8cutlass9pack_amaxILb0EEEvNS_10PackParamsE",
         "maxima of larger groups go before, of those operands alone");
  p.hadamard = true;
  before = runtime::launches.size();
  run_pack(kPacks[0], p);
  report(runtime::launches[before].smem_bytes == 8000 &&
             runtime::launches[before].kernel->name == "_ZN10fp8cutlass9pack_amaxILb1EEEvNS_10PackParamsE" &&
             last().kernel->name == "_ZN10fp8cutlass4packILb1EEEvNS_10PackParamsE",
         "rotated rows have forms of their own");
  p.hadamard = false, p.operand[kPackK].amax = nullptr;
  p.k_mean = reinterpret_cast<float*>(0x700000);
  run_pack(kPacks[0], p);
  report(last().kernel->name == "_ZN10fp8cutlass4packILb1EEEvNS_10PackParamsE", "so have smoothed keys");
  p.k_mean = nullptr;
  run_pack(kPacks[1], p);
  report(last().params<PackParams>().operand[kPackV].blocks == 4 && last().ctas == 2 * (2 * 4 + 2 * 4 + 4 * 2),
         "the CTAs of a cluster share a block");

  RaggedPack batch{};
  batch.tokens = 700, batch.heads = 4;
  launch_ragged(kPacks[0], p, batch, 0, nullptr);
  report(last().ctas == 40 + 3 && last().ragged.first_cta == 40 && last().ragged.tokens == 700 &&
             last().threads == 256 && last().smem_bytes == 8000 &&
             last().params<PackParams>().operand[kPackQ].ctas == 16 &&
             last().kernel->name == "_ZN10fp8cutlass11pack_raggedENS_10PackParamsENS_10RaggedPackE",
         "a ragged batch: CTAs behind those of the blocks look for rows of no sequence");
  launch_ragged(kPacks[1], p, batch, 0, nullptr);
  report(last().ctas == 48 + 4 && last().ragged.first_cta == 48, "in whole clusters");
  p.operand[kPackQ] = {};
  Handover& h = p.handover;
  unsigned words = 0;
  h.ready = h.counters = &words;
  h.sm_count = 132, h.keep = 40, h.head_blocks = 6, h.blocks = 24;
  report(run_pack(kPacks[0], p).empty(), "a handover is launched");
  const auto& delivered = last().params<sm90::DeliverParams>();
  report(last().ctas == 12 && last().threads == 256 && last().smem_bytes == 50176 &&
             delivered.p.handover.kept_ctas == 120 && delivered.p.operand[kPackK].blocks == 3 &&
             last().kernel->name == "_ZN10fp8cutlass12pack_deliverENS_4sm9013DeliverParamsE",
         "of runs of two blocks");
  report(delivered.source[kPackV].opaque[1] == 112 &&
             delivered.source[kPackV].opaque[8] == (uint64_t{128} << 32 | 128) && delivered.values.opaque[2] == 64 &&
             delivered.values.opaque[6] == (uint64_t{128} << 32 | 64),
         "with maps of the caller's rows and of packed V");
  h.sm_count = 2;
  run_pack(kPacks[0], p);
  report(last().ctas == 6, "no more CTAs than there is room for");
}

static void check_loading() {
  const int loaded = runtime::loaded;
  run(problem()), run(problem());
  report(runtime::loaded == loaded, "a kernel is loaded once");
  const int brought = runtime::brought;
  runtime::capturing = true;
  report(run(problem(), "plain", 1).empty() && runtime::loaded == loaded && runtime::brought == brought + 1,
         "a second device brings it into its context");
  report(runtime::conflicts == 0 && runtime::mode == cudaStreamCaptureModeGlobal,
         "in a capture the thread says that loading is none of its business, and takes that back");
  report(run(problem(), "plain", 70).empty() && run(problem(), "plain", 70).empty(), "there may be many devices");
  runtime::capturing = false;

  const int found = runtime::found;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([] { load_kernels(variant("unrolled"), 2), load_kernels(variant("walks"), 2); });
  for (std::thread& thread : threads) thread.join();
  report(runtime::found == found + 6, "threads that come at a time load each form once");
  const int before = runtime::found;
  for (const PackEntry& pack : kPacks) load_kernels(pack, 2);
  report(runtime::found == before + 6 + 5 + 4 + 3, "all forms of a pack, and none that it does not have");
}

// FP8 operands: V and K take CTAs, Q is read as it lies; descales of one operand are spread.
static void check_copies() {
  Fp8PackParams p{};
  p.batch = 2, p.head_dim = 48;
  const int tokens[] = {300, 300};
  for (const PackOrder which : {kPackV, kPackK}) {
    Fp8Operand& o = p.operand[which];
    o.x = reinterpret_cast<const uint8_t*>(0x500000 + 0x100000 * which);
    o.heads = 3, o.tokens = tokens[which], o.rows = which == kPackV ? 384 : 300;
  }
  p.descale[kPackQ].count = 2049;
  const size_t before = runtime::launches.size();
  launch_fp8(kPacks[3], p, 0, nullptr);
  const auto& got = last().params<Fp8PackParams>();
  report(runtime::launches.size() == before + 1 && last().threads == 256 && last().smem_bytes == 8448 &&
             last().kernel->name == "_ZN10fp8cutlass6copiesENS_13Fp8PackParamsE",
         "FP8 operands take one launch");
  report(got.operand[kPackV].blocks == 3 && got.operand[kPackV].ctas == 18 && got.operand[kPackK].ctas == 18 &&
             got.operand[kPackQ].ctas == 0 && got.first_cta == 36 && last().ctas == 36 + 3,
         "a CTA for each block that is copied, and for 1,024 descales");
  p.descale[kPackQ].count = 1 << 30;
  launch_fp8(kPacks[3], p, 0, nullptr);
  report(last().ctas == 36 + 256, "of many descales a CTA takes more");
  p.operand[kPackV] = p.operand[kPackK] = {};
  p.descale[kPackQ].count = 0;
  launch_fp8(kPacks[3], p, 0, nullptr);
  report(runtime::launches.size() == before + 2, "nothing to copy takes no launch");

  Fp8PackParams packed{};
  packed.batch = 1, packed.head_dim = 64;
  Fp8Operand& v = packed.operand[kPackV];
  v.x = reinterpret_cast<const uint8_t*>(0x500000), v.heads = 3, v.tokens = 1000, v.rows = 8 * 192, v.block = 192;
  RaggedPack batch{};
  batch.tokens = 700, batch.heads = 4;
  launch_fp8_ragged(kPacks[3], packed, batch, 0, nullptr);
  report(last().params<Fp8PackParams>().operand[kPackV].blocks == 8 && last().params<Fp8PackParams>().pieces == 2 &&
             last().ctas == 12 + 3 && last().ragged.first_cta == 12 && last().ragged.tokens == 700 &&
             last().smem_bytes == 128 + 2 * 192 * 66 &&
             last().kernel->name == "_ZN10fp8cutlass13copies_raggedENS_13Fp8PackParamsENS_10RaggedPackE",
         "a ragged batch in FP8: two blocks a CTA, and CTAs behind look for rows of no sequence");
  packed.operand[kPackK] = v, packed.operand[kPackK].heads = 2, packed.operand[kPackK].block = 0;
  launch_fp8_ragged(kPacks[3], packed, batch, 0, nullptr);
  report(last().params<Fp8PackParams>().operand[kPackK].blocks == 12 && last().ragged.first_cta == (24 + 24) / 2,
         "128 rows where keys are in no blocks");
}

static void check_refusals() {
  const std::string absent = run(problem(), "absent");
  report(says(absent, "kernels-sm90a.bin has no kernel absent") && says(absent, "install the package again"),
         "a kernel that is not in the file");
  runtime::minor = 1;
  const std::string other = run(problem(), "plain", 11);
  report(says(other, "kernels-other.bin is not for other: target sm90a"), "a file of another target");
  runtime::minor = 2;
  const std::string stale = run(problem(), "plain", 12);
  report(says(stale, "is of another build than the library beside it") && says(stale, "install the package again"),
         "a file of another build");
  runtime::minor = 3;
  const std::string missing = run(problem(), "plain", 13);
  report(says(missing, "the kernels for missing cannot be read") && says(missing, "kernels-missing.bin: No such file"),
         "a file that is not there");
  runtime::minor = 4;
  const std::string cut = run(problem(), "plain", 14);
  report(says(cut, "kernels-short.bin ends before kernel plain"), "a file that is cut off");
  runtime::minor = 5;
  const std::string nothing = run(problem(), "plain", 15);
  report(
      says(nothing, "holds no code for CUDA device 15 (compute capability 9.5)") && says(nothing, "FP8CUTLASS_ARCHS"),
      "a card that nothing is compiled for");
  runtime::minor = 0;
  runtime::next_load = cudaErrorInvalidKernelImage;
  const std::string invalid = run(problem(), "warp_late");
  report(says(invalid, "kernel _ZN10fp8cutlass9warp_lateENS_13ForwardParamsEi") && says(invalid, "cannot be loaded"),
         "a cubin that the driver refuses");
  runtime::next_load = cudaSuccess;
  report(run(problem(), "warp_late").empty(), "which is not held against it later");
}

int main() {
  check_maps();
  check_shapes();
  check_packs();
  check_copies();
  check_loading();
  check_refusals();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
