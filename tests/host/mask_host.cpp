// What kernels do with boolean masks, as functions of the host (tests/host/device): the kernel that packs them,
// compiled with KERNEL_FILE, its source, and what threads that compute see of a tile.
#include <cstddef>

#include "cuda_runtime.h"
#include "fp8cutlass/mask/params.h"

namespace fp8cutlass {
uint8_t flags[64 * 1024];
}

#include KERNEL_FILE

#include "fp8cutlass/seen.cuh"

using namespace fp8cutlass;

extern "C" size_t params_bytes() { return sizeof(masking::PackMaskParams); }

// Runs the CTAs of a launch; what went wrong, or null.
extern "C" const char* run(const masking::PackMaskParams* params, int ctas, unsigned seed) {
  device::Cta cta;
  cta.random.seed(seed);
  for (int block = 0; block < ctas; ++block) {
    cta.block = block;
    std::memset(flags, 0xff, sizeof(flags));
    if (device::run(cta, masking::kMaskThreads, [&] { pack_mask(*params); }) != nullptr) return cta.failure;
  }
  return nullptr;
}

// Of a visit (walk/tile_mask.h), which keys 128 rows see: (rows, keys) of float32 scores, and of f16 ones.
extern "C" const char* see(const uint32_t* bits, int visit, int keys, uint8_t* wide, uint8_t* narrow) {
  TileMask mask{};
  mask.bits = bits;
  device::Cta cta;
  return device::run(cta, 2 * kMaskTile, [&] {
    const int thread = int(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4;
    const uint2 seen = seen_bits(mask, visit, keys, thread);
    float s[kMaskTile / 8][4] = {};
    uint32_t h[kMaskTile / 8][2] = {};
    mask_unseen(s, seen), mask_unseen(h, seen);
    bool all = true;
    for (int n = 0; n < kMaskTile / 8; ++n)
      for (int i = 0; i < 4; ++i) {
        const int place = (row + i / 2 * 8) * kMaskTile + 8 * n + 2 * (thread % 4) + i % 2;
        wide[place] = s[n][i] == 0.f, all = all && wide[place];
        narrow[place] = (h[n][i / 2] >> 16 * (i % 2) & 0xffff) == 0;
      }
    if (all != ((seen.x & seen.y) == ~0u)) device::stop("a row sees all, or not");
  });
}
