// A decode kernel and the kernel that cuts its work, as functions of the host (tests/host/device). Compiled with
// KERNEL, the name of the kernel, and KERNEL_FILE, its source.
#include <cstddef>

#include "cuda_runtime.h"
#include "fp8cutlass/decode/params.h"

namespace fp8cutlass {
alignas(1024) uint8_t memory[256 * 1024];
}

#include KERNEL_FILE
#include CUT_FILE

using namespace fp8cutlass;

// Numbers of a call, each 64 bits, in this order. Python fills them in.
struct Call {
  const int* lengths;
  const int* cu_q;
  int64_t total_q, sequences, most_keys, heads, kv_heads, left, right, each;
  int64_t ctas, overhead, whole;
  const void* q;
  int64_t q_row, q_head, q_bf16;
  const uint8_t *k, *v;
  int64_t k_page, k_token, k_head, v_page, v_token, v_head;
  const uint8_t* const* readable;  // what copies may read: begin, end, begin, ...
  int64_t readable_count;
  const uint8_t* token_descale;
  int64_t descale_page, descale_token, descale_head;
  const uint8_t* page_descale;  // of V
  int64_t v_descale_page, v_descale_head;
  const float *k_descale, *v_descale;
  int64_t k_descale_sequence, k_descale_step, v_descale_sequence, v_descale_step;
  double k_value, v_value;
  const int* page_table;
  int64_t table_row, page_size, pages;
  const void* sinks;
  int64_t sink_head, sink_token, sink_type;
  double scale, softcap;
  void* o;
  int64_t o_row, o_head;
  float* lse;
  int64_t late, seed, routed;
  int* cuts;  // (ctas + 1, 12), written
};

// What went wrong, or null.
extern "C" const char* run(const Call* call) {
  const Call& c = *call;
  const decode::Batch batch{c.lengths,
                            c.cu_q,
                            int(c.total_q),
                            int(c.sequences),
                            int(c.most_keys),
                            int(c.heads),
                            int(c.kv_heads),
                            decode::divisor(int(c.heads / c.kv_heads)),
                            decode::divisor(int(c.kv_heads)),
                            int(c.left),
                            int(c.right),
                            int(c.each),
                            int(c.routed)};
  std::vector<decode::Cut> cuts(c.ctas + 1);
  std::vector<unsigned> arrived(c.ctas * decode::kArrivals, 77);
  std::vector<float> parts(2 * c.ctas * decode::kPartFloats<kHeadDim, kRows>, NAN);
  device::Cta cta;
  cta.random.seed(unsigned(c.seed));
  cta.late = c.late != 0;
  const decode::CutParams cutting{batch,           kRows,        kTile,       int(c.ctas),
                                  int(c.overhead), int(c.whole), cuts.data(), arrived.data()};
  std::memset(memory, 0xff, sizeof(memory));
  if (device::run(cta, decode::kCutThreads, [&] { cut(cutting); }) != nullptr) return cta.failure;
  std::memcpy(c.cuts, cuts.data(), cuts.size() * sizeof(decode::Cut));
  decode::DecodeParams p{};
  p.batch = batch;
  p.q = c.q, p.q_row = c.q_row, p.q_head = c.q_head, p.q_bf16 = int(c.q_bf16);
  p.k = {c.k, c.k_page, c.k_token, c.k_head}, p.v = {c.v, c.v_page, c.v_token, c.v_head};
  p.k_token = {c.token_descale, c.descale_page, c.descale_token, c.descale_head};
  p.v_token = {c.page_descale, c.v_descale_page, 0, c.v_descale_head};
  p.k_descale = {c.k_descale, int(c.k_descale_sequence), int(c.k_descale_step), float(c.k_value)};
  p.v_descale = {c.v_descale, int(c.v_descale_sequence), int(c.v_descale_step), float(c.v_value)};
  p.page_table = c.page_table, p.table_row = c.table_row, p.by_page_size = decode::divisor(int(c.page_size)),
  p.pages = int(c.pages);
  p.entries = int(c.most_keys / c.page_size);
  p.sinks = c.sinks, p.sink_head = c.sink_head, p.sink_token = c.sink_token, p.sink_type = int(c.sink_type);
  p.ctas = int(c.ctas);
  p.scale = float(c.scale), p.softcap = float(c.softcap);
  p.o = c.o, p.o_row = c.o_row, p.o_head = c.o_head, p.lse = c.lse;
  p.cuts = cuts.data(), p.arrived = arrived.data(), p.parts = parts.data();
  std::vector<unsigned> order(c.ctas);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), cta.random);
  for (int64_t i = 0; i < c.readable_count; ++i) cta.readable.emplace_back(c.readable[2 * i], c.readable[2 * i + 1]);
  for (const unsigned block : order) {
    cta.block = block;
    std::memset(memory, 0xff, sizeof(memory));
    if (device::run(cta, kThreads, [&] { KERNEL(p); }) != nullptr) return cta.failure;
  }
  for (const unsigned n : arrived)
    if (n != 0) return "a counter of arrivals is not zero at the end";
  return nullptr;
}
