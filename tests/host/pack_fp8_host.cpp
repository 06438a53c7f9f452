// A kernel that brings FP8 operands to attention kernels, as a function of the host (tests/host/device). Compiled with
// KERNEL, the name of the kernel, and KERNEL_FILE, its source.
#include "cuda_runtime.h"
#include "fp8cutlass/pack_fp8_params.h"

static unsigned grid = 0;
#define gridDim (device::Index{grid})
#define __ldg(pointer) (*(pointer))

// Of other kernels of the same headers; nothing here calls them.
float __fmul_rn(float, float), __frcp_rn(float);
uint32_t __vmaxu2(uint32_t, uint32_t), __vcmpgeu2(uint32_t, uint32_t), __reduce_max_sync(unsigned, uint32_t);
int atomicMax(int*, int);
uint32_t atomicMax(uint32_t*, uint32_t);

namespace fp8cutlass {
uint32_t e4m3x4(float, float, float, float);
alignas(16) uint8_t stage[kRoomOnHopper.memory];
}  // namespace fp8cutlass

#include KERNEL_FILE

using namespace fp8cutlass;

#define JOINED(a, b) a##b
#define RAGGED_OF(kernel) JOINED(kernel, _ragged)

extern "C" int params_bytes() { return int(sizeof(Fp8PackParams)); }
extern "C" int ragged_bytes() { return int(sizeof(RaggedPack)); }

// As the launch has it (csrc/launch_pack.cpp).
static int count_ctas(Fp8PackParams& p) {
  int ctas = 0;
  for (Fp8Operand& o : p.operand) {
    if (o.x == nullptr) continue;
    const int rows = o.block > 0 ? o.block : kRows;
    o.blocks = (o.rows + rows - 1) / rows, o.ctas = p.batch * o.heads * o.blocks;
    ctas += o.ctas;
  }
  return ctas;
}

// Runs all CTAs in a random order; what went wrong, or null.
template <class Program>
static const char* run_grid(const Fp8PackParams& p, int seed, const Program& program) {
  device::Cta cta;
  for (const Fp8Operand& o : p.operand) {
    if (o.x == nullptr) continue;
    const int64_t last = (p.batch - 1) * o.stride_batch + (o.heads - 1) * o.stride_head + (o.tokens - 1) * o.stride_row;
    cta.readable.push_back({o.x, o.x + last + p.head_dim});
  }
  cta.random.seed(unsigned(seed));
  std::vector<unsigned> order(grid);
  for (unsigned i = 0; i < grid; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), cta.random);
  for (const unsigned block : order) {
    cta.block = block;
    std::memset(stage, 0xff, sizeof(stage));
    if (device::run(cta, kThreads, program) != nullptr) return cta.failure;
  }
  return nullptr;
}

#ifdef RAGGED
// The form for a ragged batch; what went wrong, or null.
extern "C" const char* run_ragged(const Fp8PackParams* given, const RaggedPack* batch, int seed) {
  Fp8PackParams p = *given;
  RaggedPack ragged = *batch;
  const int all = count_ctas(p);
  p.pieces = pieces_of(kRoomOnHopper, Stage::kBytes / kRows, std::max(kRows, p.operand[kPackV].block));
  ragged.first_cta = (all + p.pieces - 1) / p.pieces;
  grid = unsigned(ragged.first_cta + ragged.tokens / kThreads + 1);
  return run_grid(p, seed, [&] { RAGGED_OF(KERNEL)(p, ragged); });
}
#endif

// Runs `descale_ctas` CTAs behind those of the operands; what went wrong, or null.
extern "C" const char* run(const Fp8PackParams* given, int descale_ctas, int seed) {
  Fp8PackParams p = *given;
  const int ctas = count_ctas(p);
  p.first_cta = ctas;
  grid = unsigned(ctas + descale_ctas);
  return run_grid(p, seed, [&] { KERNEL(p); });
}
