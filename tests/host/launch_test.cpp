// What launches of an sm90a kernel ask of the driver, with a stand-in for the driver and the runtime that counts.
// Prints one line a property; exits non-zero if any fails. Built by tests/test_launch_host.py with the host compiler.
#include "fp8cutlass/sm90/launch.cuh"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>

#include "fp8cutlass/sm90/operand.h"

using namespace fp8cutlass;

static int failures = 0;
static void report(bool ok, const char* what) {
  std::printf("%s %s\n", ok ? "ok" : "FAILED", what);
  failures += !ok;
}

static unsigned long long context = 7;  // 0: there is none
static int encoded = 0, opted_in = 0;
static const void* refused = nullptr;  // the base of which no map can be made
static sm90::KernelParams launched;

// A map is what it was made of: base, then sizes, strides and box.
static CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* dims,
                             const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++encoded;
  if (base == refused) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  uint64_t* word = map->opaque;
  *word++ = reinterpret_cast<uintptr_t>(base);
  for (cuuint32_t i = 0; i < rank; ++i) *word++ = dims[i];
  for (cuuint32_t i = 0; i + 1 < rank; ++i) *word++ = strides[i];
  *word++ = uint64_t(box[0]) << 32 | box[1];
  *word = swizzle;
  return CUDA_SUCCESS;
}

static CUresult context_id_of(CUcontext, unsigned long long* id) {
  *id = context;
  return context != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static cudaError_t find(const char* name, void** entry, cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSuccess;
  if (std::strcmp(name, "cuTensorMapEncodeTiled") == 0)
    *entry = reinterpret_cast<void*>(encode_tiled);
  else if (std::strcmp(name, "cuCtxGetId") == 0)
    *entry = reinterpret_cast<void*>(context_id_of);
  else
    *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return find(name, entry, found);
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return find(name, entry, found);
}
#endif
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  ++opted_in;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void** arguments) {
  std::memcpy(static_cast<void*>(&launched), arguments[0], sizeof(launched));
  return cudaSuccess;
}
}

static void kernel(sm90::KernelParams) {}
static void other_kernel(sm90::KernelParams) {}

using Tile = sm90::OperandTile<64, 64>;
using Source = sm90::OperandTile<64, 128>;  // Q in 16 bits

static int run(const ForwardParams& p, void (*which)(sm90::KernelParams) = kernel) {
  return sm90::launch<Source, Tile, Tile, Tile, 1, 1, Mask::full>(which, 256, 60000, p, nullptr);
}

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
    encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, const_cast<uint8_t*>(base), d, s, box, nullptr,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    --encoded;
  };
  make(q, 4, p.q, qd, qs, !fp8), make(k, 4, p.k, kd, ks), make(v, 3, p.v, vd, vs);
  return std::memcmp(&launched.q, &q, sizeof(q)) == 0 && std::memcmp(&launched.k, &k, sizeof(k)) == 0 &&
         std::memcmp(&launched.v, &v, sizeof(v)) == 0;
}

static ForwardParams problem() {
  ForwardParams p{};
  p.q = reinterpret_cast<const uint8_t*>(0x100000), p.k = reinterpret_cast<const uint8_t*>(0x200000);
  p.v = reinterpret_cast<const uint8_t*>(0x300000);
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.seqlen_q = 100, p.seqlen_k = 90, p.seqlen_k_padded = 128;
  p.q_stride_row = 64, p.q_stride_head = 6400, p.q_stride_batch = 25600;
  p.k_stride_row = 64, p.k_stride_head = 5760, p.k_stride_batch = 11520;
  p.sm_count = 132;
  return p;
}

int main() {
  const ForwardParams base = problem();
  report(run(base) == cudaSuccess && fresh(base) && encoded == 3 && opted_in == 1,
         "a first launch encodes and opts in");
  report(run(base) == cudaSuccess && fresh(base) && encoded == 3 && opted_in == 1, "the same again does neither");
  run(base, other_kernel);
  report(encoded == 3 && opted_in == 2, "another kernel opts in");

  bool right = true;
  int changes = 0;
  const auto changed = [&](auto change) {
    ForwardParams p = base;
    change(p);
    const int before = encoded;
    right = run(p) == cudaSuccess && fresh(p) && encoded > before && right;
    right = run(base) == cudaSuccess && fresh(base) && right;  // and back
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
  context = 8;
  report(run(base) == cudaSuccess && encoded == encoded_before + 3 && opted_in == opted_before + 1,
         "another context encodes and opts in anew");
  context = 0;
  run(base), run(base);
  report(encoded == encoded_before + 9 && opted_in == opted_before + 3, "without a context nothing is kept");
  context = 8;
  std::thread([&] { run(base); }).join();
  report(encoded == encoded_before + 12 && opted_in == opted_before + 4 && fresh(base),
         "a thread relies on nothing that another one did");

  ForwardParams bad = base;
  bad.k = reinterpret_cast<const uint8_t*>(0x400000);
  refused = bad.k;
  report(run(bad) == cudaErrorInvalidPitchValue && run(bad) == cudaErrorInvalidPitchValue, "a refusal is not kept");
  refused = nullptr;
  report(run(bad) == cudaSuccess && fresh(bad), "nor held against the next");
  std::printf("%d failures\n", failures);
  return failures != 0;
}
