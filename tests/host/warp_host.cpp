// An attention kernel of family sm89 as a function of the host (tests/host/device). Compiled with KERNEL, the name of
// the kernel, and KERNEL_FILE, its source.
#include "cuda_runtime.h"
#include "fp8cutlass/bias_params.h"
#include "fp8cutlass/params.h"
#include "fp8cutlass/walk/tile_mask.h"

static unsigned grid = 1;
#define gridDim (device::Index{grid})

namespace fp8cutlass {
alignas(128) uint8_t shared_bytes[128 * 1024];
}

#include KERNEL_FILE

using namespace fp8cutlass;

// Numbers of a call, each 64 bits, in this order. Python fills them in.
struct Call {
  const uint8_t *q, *k, *v;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row;
  const float *q_descale, *k_descale, *v_descale;
  int64_t q_descale_head, q_descale_row, k_descale_head, k_descale_block, v_descale_head, v_descale_block;
  const float* out_descale;
  void* o;
  int64_t o_batch, o_head, o_row;
  float *lse, *amax;
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, padded;
  int64_t causal_offset, window_offset;
  const float* sinks;
  double scale, cap;
  RowTile* tiles;  // of a ragged batch
  int* count;
  int64_t bottom_right, q_descale_sequence, k_descale_sequence, v_descale_sequence;
  const uint8_t* const* readable;  // what copies and loads may read: begin, end, begin, ...
  int64_t readable_count, items, ctas, late, seed;
  const int *mask_tiles, *mask_counts;  // of kernels for lists
  const uint32_t* mask_bits;
  int64_t list_batch, list_head, list_row, key_tiles, bit_tiles;
  const void* bias;  // of kernels that add one
  int64_t bias_batch, bias_head, bias_row, bias_key, bias_type, bias_pairs;
};

#if defined(LISTED)
#define LAUNCH(p, items, mask, bias) KERNEL(p, items, mask)
#elif defined(BIASED)
#define LAUNCH(p, items, mask, bias) KERNEL(p, items, bias)
#else
#define LAUNCH(p, items, mask, bias) KERNEL(p, items)
#endif

// What went wrong, or null.
extern "C" const char* run(const Call* call) {
  const Call& c = *call;
  ForwardParams p{};
  p.q = c.q, p.k = c.k, p.v = c.v;
  p.q_stride_batch = c.q_batch, p.q_stride_head = c.q_head, p.q_stride_row = c.q_row;
  p.k_stride_batch = c.k_batch, p.k_stride_head = c.k_head, p.k_stride_row = c.k_row;
  p.q_descale = c.q_descale, p.k_descale = c.k_descale, p.v_descale = c.v_descale;
  p.q_descale_head = int(c.q_descale_head), p.q_descale_row = int(c.q_descale_row);
  p.k_descale_head = int(c.k_descale_head), p.k_descale_block = int(c.k_descale_block);
  p.v_descale_head = int(c.v_descale_head), p.v_descale_block = int(c.v_descale_block);
  p.out_descale = c.out_descale, p.o = c.o, p.lse = c.lse, p.amax = c.amax, p.sinks = c.sinks;
  p.o_stride_batch = c.o_batch, p.o_stride_head = c.o_head, p.o_stride_row = c.o_row;
  p.batch = int(c.batch), p.heads = int(c.heads), p.kv_heads = int(c.kv_heads);
  p.seqlen_q = int(c.seqlen_q), p.seqlen_k = int(c.seqlen_k), p.seqlen_k_padded = int(c.padded);
  p.causal_offset = int(c.causal_offset), p.window_offset = int(c.window_offset);
  p.scale = float(c.scale), p.cap = float(c.cap);
  p.item_rows = kTileM;
  p.ragged.tiles = c.tiles, p.ragged.count = c.count, p.ragged.bottom_right = int(c.bottom_right);
  p.ragged.q_descale_sequence = int(c.q_descale_sequence), p.ragged.k_descale_sequence = int(c.k_descale_sequence);
  p.ragged.v_descale_sequence = int(c.v_descale_sequence);
  [[maybe_unused]] const TileMask mask{c.mask_tiles,     c.mask_counts,   c.mask_bits,      int(c.list_batch),
                                       int(c.list_head), int(c.list_row), int(c.key_tiles), int(c.bit_tiles)};
  [[maybe_unused]] const Bias bias{c.bias,     c.bias_batch,          c.bias_head,       c.bias_row,
                                   c.bias_key, BiasType(c.bias_type), c.bias_pairs != 0, false};
  device::Cta cta;
  cta.random.seed(unsigned(c.seed));
  cta.late = c.late != 0;
  for (int64_t i = 0; i < c.readable_count; ++i) cta.readable.emplace_back(c.readable[2 * i], c.readable[2 * i + 1]);
  grid = unsigned(c.ctas);
  std::vector<unsigned> order(grid);
  for (unsigned i = 0; i < grid; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), cta.random);
  for (const unsigned block : order) {
    cta.block = block;
    std::memset(shared_bytes, 0xff, sizeof(shared_bytes));
    if (device::run(cta, kThreads, [&] { LAUNCH(p, int(c.items), mask, bias); }) != nullptr) return cta.failure;
  }
  return nullptr;
}
