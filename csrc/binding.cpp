// The torch operators of the extension, through LibTorch's stable ABI: one library serves every torch from 2.10 on.
//
// `forward` and `diagnose` launch one variant, `pack` the kernel that makes its operands or some of them, `attend`
// both, `attend_fp8` and `attend_packed` the same where K and V are FP8, `forward_ragged`, `attend_ragged` and
// `attend_ragged_fp8` the same of a ragged batch, `cut` and `decode` those of decode, `prefill` those of long chunks
// over pages, `append` the one that writes to pages, `pack_mask` the one that packs a boolean mask, `merge` the
// one that merges partial results, on the current stream of the tensors' device. They return without synchronising, so
// they can be captured into a CUDA graph. Outputs are written in place, but for the results of `attend` and its
// sisters.
#include <torch/csrc/stable/library.h>

#include "append.h"
#include "arguments.h"
#include "attend.h"
#include "attend_fp8.h"
#include "attend_ragged.h"
#include "attend_ragged_fp8.h"
#include "check.h"
#include "decode.h"
#include "device.h"
#include "kernels.h"
#include "launch.h"
#include "launch_pack.h"
#include "masks.h"
#include "merge.h"
#include "pack_arguments.h"
#include "prefill.h"
#include "ragged.h"
#include "registry.h"
#include "resident.h"

namespace fp8cutlass {

namespace {

const VariantEntry& find_variant(int64_t variant, bool diagnostic) {
  require(variant >= 0 && variant < kVariantCount, "variant ", variant, " is not in the registry of ", kVariantCount);
  const VariantEntry& entry = kVariants[variant];
  require(entry.diagnostic == diagnostic, "variant ", entry.id,
          entry.diagnostic ? " is diagnostic: call diagnose" : " is no diagnostic variant: call forward");
  return entry;
}

void launch_here(const VariantEntry& variant, ForwardParams& params, const Tensor& q, const MaskParams& mask = {}) {
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  launch(variant, params, device, current_stream(device), mask);
}

void forward(int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_descale,
             const Tensor& k_descale, const Tensor& v_descale, const std::optional<Tensor>& out_descale,
             const Tensor& out, const std::optional<Tensor>& lse, const std::optional<Tensor>& amax, double scale,
             int64_t causal_offset, int64_t window_offset, bool merge_lse, double softcap,
             const std::optional<Tensor>& sinks, const std::optional<Tensor>& tiles,
             const std::optional<Tensor>& counts, const std::optional<Tensor>& bits,
             const std::optional<Tensor>& bias) {
  const VariantEntry& entry = find_variant(variant, false);
  ForwardParams params = forward_params({q, k, v, q_descale, k_descale, v_descale, out_descale, out, lse, amax, scale,
                                         causal_offset, window_offset, std::nullopt, merge_lse, sinks, softcap},
                                        entry);
  launch_here(entry, params, q, mask_params({tiles, counts, bits, bias}, params, entry, q.get_device_index()));
}

void diagnose(int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_descale,
              const Tensor& k_descale, const Tensor& v_descale, const std::optional<Tensor>& out_descale,
              const Tensor& out, const std::optional<Tensor>& lse, const std::optional<Tensor>& amax, double scale,
              int64_t causal_offset, const Tensor& scores, const Tensor& p, const Tensor& weight,
              const Tensor& tile_o) {
  const VariantEntry& entry = find_variant(variant, true);
  ForwardParams params = forward_params(
      {q, k, v, q_descale, k_descale, v_descale, out_descale, out, lse, amax, scale, causal_offset, 0, std::nullopt},
      entry);
  params.diag = diagnostic_outputs({scores, p, weight, tile_o}, q, params, entry);
  launch_here(entry, params, q);
}

void pack(int64_t key_block, const std::optional<Tensor>& q, const std::optional<Tensor>& k,
          const std::optional<Tensor>& v, int64_t q_granularity, int64_t k_granularity, int64_t v_granularity,
          double score_amax, double v_amax, bool negate_q, const std::optional<Tensor>& q8,
          const std::optional<Tensor>& k8, const std::optional<Tensor>& v8, const std::optional<Tensor>& q_descale,
          const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
          const std::optional<Tensor>& amax, bool hadamard, const std::optional<Tensor>& k_mean) {
  const PackArguments arguments{
      key_block, q,  k,  v,         q_granularity, k_granularity, v_granularity, score_amax, v_amax, negate_q,
      q8,        k8, v8, q_descale, k_descale,     v_descale,     amax,          hadamard,   k_mean, std::nullopt};
  const PackEntry& entry = find_pack(arguments);
  const PackParams params = pack_params(arguments);
  const int device = static_cast<int>(first_operand(arguments).device());
  const DeviceGuard guard(device);
  launch(entry, params, device, current_stream(device));
}

void forward_ragged(int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_descale,
                    const Tensor& k_descale, const Tensor& v_descale, const Tensor& cu_q, const Tensor& cu_k,
                    const std::optional<Tensor>& used_q, const std::optional<Tensor>& used_k, const Tensor& plan,
                    const Tensor& out, const std::optional<Tensor>& lse, double scale, int64_t window_left,
                    int64_t window_right, bool bottom_right, bool keys_in_blocks, double softcap,
                    const std::optional<Tensor>& sinks) {
  const VariantEntry& entry = find_variant(variant, false);
  ForwardParams params = ragged_params(
      {q,   k,   v,     q_descale,   k_descale,    v_descale,    cu_q,           cu_k,         used_q, used_k, plan,
       out, lse, scale, window_left, window_right, bottom_right, keys_in_blocks, std::nullopt, sinks,  softcap},
      entry);
  launch_here(entry, params, q);
}

// Loads the code of a variant on a device, and of the kernel that makes its operands from `source`: a position in
// SourceType, or -1 for operands that are there. A first launch does that as well, but takes its time.
void load(int64_t variant, int64_t device, int64_t source) {
  require(variant >= 0 && variant < kVariantCount, "variant ", variant, " is not in the registry of ", kVariantCount);
  const VariantEntry& entry = kVariants[variant];
  const DeviceGuard guard(static_cast<int>(device));
  load_kernels(entry, static_cast<int>(device));
  for (int i = 0; i < kPackCount; ++i) {
    const PackEntry& pack = kPacks[i];
    if (pack.head_dim == entry.head_dim && static_cast<int64_t>(pack.source) == source &&
        (!pack.quantises() || (pack.key_block == entry.key_block && pack.integer == (entry.k == Granularity::group) &&
                               pack.integer_v == (entry.v == Granularity::token))))
      load_kernels(pack, static_cast<int>(device));
  }
}

int64_t ragged_plan_words(int64_t variant, int64_t tokens, int64_t sequences) {
  return plan_words(tokens, sequences, find_variant(variant, false));
}

const DecodeEntry& find_decode(int64_t decode) {
  require(decode >= 0 && decode < kDecodeCount, "decode kernel ", decode, " is not in the registry of ", kDecodeCount);
  return kDecodes[decode];
}

// Loads a kernel that keeps K and V.
void load_resident(int64_t resident, int64_t device) {
  require(resident >= 0 && resident < kResidentCount, "kernel ", resident,
          " that keeps K and V is not in the registry of ", kResidentCount);
  const DeviceGuard guard(static_cast<int>(device));
  load_kernels(kResidents[resident], static_cast<int>(device));
}

void cut(const Tensor& numbers, const Tensor& lengths, const std::optional<Tensor>& cu_q, int64_t total_q,
         int64_t most_keys, int64_t heads, int64_t kv_heads, const Tensor& work) {
  const DecodeNumbers n = decode_numbers(numbers);
  cut_decode(find_decode(n.decode), n, {lengths, view_of(cu_q), total_q, most_keys, heads, kv_heads}, work);
}

Tensor decode_pages(const Tensor& numbers, const Tensor& q, const Tensor& k, const Tensor& v,
                    const std::optional<Tensor>& page_table, const Tensor& lengths, const std::optional<Tensor>& cu_q,
                    const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
                    const std::optional<Tensor>& k_token, const std::optional<Tensor>& v_page,
                    const std::optional<Tensor>& sinks, const std::optional<Tensor>& work,
                    const std::optional<Tensor>& out, const std::optional<Tensor>& lse) {
  const DecodeNumbers n = decode_numbers(numbers);
  return run_decode(find_decode(n.decode), n,
                    {q, k, v, page_table, lengths, cu_q, k_descale, v_descale, k_token, v_page, sinks, work, out, lse});
}

void prefill_paged(const Tensor& numbers, int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v,
                   const std::optional<Tensor>& page_table, const Tensor& lengths, const std::optional<Tensor>& cu_q,
                   const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
                   const std::optional<Tensor>& k_token, const std::optional<Tensor>& v_page, const Tensor& out,
                   const std::optional<Tensor>& lse, const Tensor& rest, double score_amax, int64_t least, int64_t most,
                   int64_t capacity) {
  const DecodeNumbers n = decode_numbers(numbers);
  const PagedViews pages{
      k,           v,           view_of(k_token),   view_of(v_page), view_of(k_descale), view_of(v_descale),
      n.k_descale, n.v_descale, view_of(page_table)};
  prefill_pages(find_variant(variant, false), n,
                {q, pages, lengths, view_of(cu_q), out, view_of(lse), rest, score_amax, least, most, capacity});
}

void append_to_pages(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                     const std::optional<Tensor>& k_token, const std::optional<Tensor>& v_page,
                     const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
                     const std::optional<Tensor>& slots, const std::optional<Tensor>& positions,
                     const std::optional<Tensor>& cu, const std::optional<Tensor>& lengths,
                     const std::optional<Tensor>& page_table, const std::optional<Tensor>& used,
                     const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, bool interleaved,
                     const std::optional<Tensor>& k_mean, bool hadamard) {
  append_tokens({k, v, k_cache, v_cache, view_of(k_token), view_of(v_page), view_of(k_descale), view_of(v_descale),
                 view_of(slots), view_of(positions), view_of(cu), view_of(lengths), view_of(page_table), view_of(used),
                 view_of(cos), view_of(sin), interleaved, view_of(k_mean), hadamard});
}

void load_decode(int64_t decode, int64_t device) {
  const DeviceGuard guard(static_cast<int>(device));
  load_kernels(find_decode(decode), static_cast<int>(device));
}

Tensor attend_half(const Tensor& constants, const Tensor& q, const Tensor& k, const Tensor& v,
                   const std::optional<Tensor>& out_descale, const std::optional<Tensor>& lse,
                   const std::optional<Tensor>& amax, const std::optional<Tensor>& sinks,
                   const std::optional<Tensor>& k_mean, const std::optional<Tensor>& tiles,
                   const std::optional<Tensor>& counts, const std::optional<Tensor>& bits,
                   const std::optional<Tensor>& bias) {
  const AttendConstants c = attend_constants(constants);
  return attend(c, {q, k, v, k_mean, out_descale, lse, amax, sinks, {tiles, counts, bits, bias}},
                find_variant(c.variant, false));
}

Tensor attend_quantised(const Tensor& constants, const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::optional<Tensor>& q_descale, const std::optional<Tensor>& k_descale,
                        const std::optional<Tensor>& v_descale, const std::optional<Tensor>& out_descale,
                        const std::optional<Tensor>& lse, const std::optional<Tensor>& amax,
                        const std::optional<Tensor>& sinks, const std::optional<Tensor>& tiles,
                        const std::optional<Tensor>& counts, const std::optional<Tensor>& bits,
                        const std::optional<Tensor>& bias) {
  const AttendConstants c = attend_constants(constants);
  return attend_fp8(
      c, {q, k, v, q_descale, k_descale, v_descale, out_descale, lse, amax, sinks, {tiles, counts, bits, bias}},
      find_variant(c.variant, false));
}

Tensor attend_kept(const Tensor& constants, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_descale,
                   const Tensor& v_descale, const std::optional<Tensor>& out_descale, const std::optional<Tensor>& lse,
                   const std::optional<Tensor>& amax, const std::optional<Tensor>& sinks,
                   const std::optional<Tensor>& tiles, const std::optional<Tensor>& counts,
                   const std::optional<Tensor>& bits, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& out) {
  const AttendConstants c = attend_constants(constants);
  return attend_packed(c,
                       {q, k, v, k_descale, v_descale, out_descale, lse, amax, sinks, {tiles, counts, bits, bias}, out},
                       find_variant(c.variant, false));
}

Tensor attend_batch(int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                    const Tensor& cu_k, const std::optional<Tensor>& used_q, const std::optional<Tensor>& used_k,
                    const std::optional<Tensor>& lse, double score_amax, double v_amax, double scale,
                    int64_t window_left, int64_t window_right, bool bottom_right, bool leave_q,
                    const std::optional<Tensor>& workspace, double softcap, const std::optional<Tensor>& sinks,
                    int64_t resident) {
  const RaggedNumbers n{score_amax, v_amax, scale, window_left, window_right, bottom_right, leave_q, softcap};
  const RaggedTensors tensors{q, k, v, cu_q, cu_k, used_q, used_k, lse, workspace, sinks};
  const VariantEntry& entry = find_variant(variant, false);
  return resident < 0 ? attend_ragged(n, tensors, entry) : attend_resident_ragged(n, tensors, entry, resident);
}

Tensor attend_fp8_batch(int64_t variant, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_descale,
                        const Tensor& k_descale, const Tensor& v_descale, const Tensor& cu_q, const Tensor& cu_k,
                        const std::optional<Tensor>& used_q, const std::optional<Tensor>& used_k,
                        const std::optional<Tensor>& lse, double score_amax, double scale, int64_t window_left,
                        int64_t window_right, bool bottom_right, double softcap, const std::optional<Tensor>& sinks) {
  return attend_ragged_fp8({score_amax, scale, window_left, window_right, bottom_right, softcap},
                           {q, k, v, q_descale, k_descale, v_descale, cu_q, cu_k, used_q, used_k, lse, sinks},
                           find_variant(variant, false));
}

}  // namespace

}  // namespace fp8cutlass

#define FP8CUTLASS_COMMON_ARGUMENTS                                                                   \
  "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, " \
  "Tensor? out_descale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? amax, float scale, int causal_offset"

// Of a mask in lists of tiles, or a bias.
#define FP8CUTLASS_MASK_ARGUMENTS ", Tensor? tiles=None, Tensor? counts=None, Tensor? bits=None, Tensor? bias=None"

// The library's name is a macro (CMakeLists.txt), which torch's macros would paste as it is.
#define FP8CUTLASS_DEF(library, m) STABLE_TORCH_LIBRARY(library, m)
#define FP8CUTLASS_IMPL(library, key, m) STABLE_TORCH_LIBRARY_IMPL(library, key, m)

FP8CUTLASS_DEF(FP8CUTLASS_LIBRARY, m) {
  m.def("forward(" FP8CUTLASS_COMMON_ARGUMENTS
        ", int window_offset=0, bool merge_lse=False, float softcap=0.0, "
        "Tensor? sinks=None" FP8CUTLASS_MASK_ARGUMENTS ") -> ()");
  m.def("diagnose(" FP8CUTLASS_COMMON_ARGUMENTS
        ", Tensor(d!) scores, Tensor(e!) p, Tensor(f!) weight, Tensor(g!) tile_o) -> ()");
  m.def(
      "pack(int key_block, Tensor? q, Tensor? k, Tensor? v, int q_granularity, int k_granularity, int v_granularity, "
      "float score_amax, float v_amax, bool negate_q, Tensor(a!)? q8, Tensor(b!)? k8, Tensor(c!)? v8, "
      "Tensor(d!)? q_descale, Tensor(e!)? k_descale, Tensor(f!)? v_descale, Tensor(g!)? amax, "
      "bool hadamard, Tensor(h!)? k_mean) -> ()");
  m.def(
      "forward_ragged(int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor(a!) plan, "
      "Tensor(b!) out, Tensor(c!)? lse, float scale, int window_left, int window_right, bool bottom_right, "
      "bool keys_in_blocks, float softcap=0.0, Tensor? sinks=None) -> ()");
  m.def("ragged_plan_words(int variant, int tokens, int sequences) -> int");
  m.def(
      "cut(Tensor numbers, Tensor lengths, Tensor? cu_seqlens_q, int total_q, int most_keys, int heads, int kv_heads, "
      "Tensor(a!) work) -> ()");
  m.def(
      "decode(Tensor numbers, Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor lengths, "
      "Tensor? cu_seqlens_q=None, Tensor? k_descale=None, Tensor? v_descale=None, Tensor? k_token_descale=None, "
      "Tensor? v_page_descale=None, Tensor? sinks=None, Tensor(a!)? work=None, Tensor(b!)? out=None, "
      "Tensor(c!)? lse=None) -> Tensor");
  m.def(
      "prefill(Tensor numbers, int variant, Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor lengths, "
      "Tensor? cu_seqlens_q, Tensor? k_descale, Tensor? v_descale, Tensor? k_token_descale, Tensor? v_page_descale, "
      "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) rest, float score_amax, int least, int most, int capacity) -> ()");
  m.def(
      "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_token_descale, "
      "Tensor(d!)? v_page_descale, Tensor? k_descale, Tensor? v_descale, Tensor? slots, Tensor? positions, "
      "Tensor? cu_seqlens, Tensor? lengths, Tensor? page_table, Tensor(e!)? used, Tensor? rotary_cos, "
      "Tensor? rotary_sin, bool interleaved, Tensor? k_mean, bool hadamard) -> ()");
  m.def("pack_mask(Tensor seen, int keys, Tensor(a!) tiles, Tensor(b!) counts, Tensor(c!) bits) -> ()");
  m.def("merge(Tensor(a!) out, Tensor(b!) lse, Tensor to, Tensor to_lse) -> ()");
  m.def("load_decode(int decode, int device) -> ()");
  m.def("load_resident(int resident, int device) -> ()");
  m.def("load(int variant, int device, int source=-1) -> ()");
  m.def(
      "attend_ragged(int variant, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "Tensor? seqused_q, Tensor? seqused_k, Tensor(a!)? lse, float score_amax, float v_amax, float scale, "
      "int window_left, int window_right, bool bottom_right, bool leave_q, Tensor(b!)? workspace=None, float "
      "softcap=0.0, "
      "Tensor? sinks=None, int resident=-1) -> Tensor");
  m.def(
      "attend_ragged_fp8(int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, "
      "Tensor v_descale, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
      "Tensor(a!)? lse, float score_amax, float scale, int window_left, int window_right, bool bottom_right, "
      "float softcap=0.0, Tensor? sinks=None) -> Tensor");
  m.def(
      "attend(Tensor constants, Tensor q, Tensor k, Tensor v, Tensor? out_descale=None, Tensor(a!)? lse=None, "
      "Tensor(b!)? amax=None, Tensor? sinks=None, Tensor(c!)? k_mean=None" FP8CUTLASS_MASK_ARGUMENTS ") -> Tensor");
  m.def(
      "attend_fp8(Tensor constants, Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, "
      "Tensor? v_descale, Tensor? out_descale=None, Tensor(a!)? lse=None, Tensor(b!)? amax=None, "
      "Tensor? sinks=None" FP8CUTLASS_MASK_ARGUMENTS ") -> Tensor");
  m.def(
      "attend_packed(Tensor constants, Tensor q, Tensor k, Tensor v, Tensor k_descale, Tensor v_descale, "
      "Tensor? out_descale=None, Tensor(a!)? lse=None, Tensor(b!)? amax=None, "
      "Tensor? sinks=None" FP8CUTLASS_MASK_ARGUMENTS ", Tensor(c!)? out=None) -> Tensor");
}

FP8CUTLASS_IMPL(FP8CUTLASS_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("ragged_plan_words", TORCH_BOX(&fp8cutlass::ragged_plan_words));
  m.impl("load", TORCH_BOX(&fp8cutlass::load));
  m.impl("load_decode", TORCH_BOX(&fp8cutlass::load_decode));
  m.impl("load_resident", TORCH_BOX(&fp8cutlass::load_resident));
}

FP8CUTLASS_IMPL(FP8CUTLASS_LIBRARY, CUDA, m) {
  m.impl("append", TORCH_BOX(&fp8cutlass::append_to_pages));
  m.impl("cut", TORCH_BOX(&fp8cutlass::cut));
  m.impl("prefill", TORCH_BOX(&fp8cutlass::prefill_paged));
  m.impl("decode", TORCH_BOX(&fp8cutlass::decode_pages));
  m.impl("forward_ragged", TORCH_BOX(&fp8cutlass::forward_ragged));
  m.impl("forward", TORCH_BOX(&fp8cutlass::forward));
  m.impl("diagnose", TORCH_BOX(&fp8cutlass::diagnose));
  m.impl("pack", TORCH_BOX(&fp8cutlass::pack));
  m.impl("pack_mask", TORCH_BOX(&fp8cutlass::pack_mask));
  m.impl("merge", TORCH_BOX(&fp8cutlass::merge));
  m.impl("attend_ragged", TORCH_BOX(&fp8cutlass::attend_batch));
  m.impl("attend_ragged_fp8", TORCH_BOX(&fp8cutlass::attend_fp8_batch));
  m.impl("attend", TORCH_BOX(&fp8cutlass::attend_half));
  m.impl("attend_fp8", TORCH_BOX(&fp8cutlass::attend_quantised));
  m.impl("attend_packed", TORCH_BOX(&fp8cutlass::attend_kept));
}
