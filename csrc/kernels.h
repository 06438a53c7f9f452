// The code of the kernels: cubins, loaded when they are first needed, from the file of the card's architecture that
// lies beside the library as `_built/kernels-<target>.bin` (docs/design/formats.md).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "registry.h"

namespace fp8cutlass {

// The functions of a source are its forms; packs of FP8 have the plain one, that of ragged batches and that of pages,
// which no other has. Of a variant: 0 takes any call, i > 0 is unrolled[i - 1], kPlainForm is VariantEntry::plain.
enum PackForm { kPackPlain, kPackTransform, kPackMaxima, kPackMaximaTransform, kPackDeliver, kPackRagged, kPackGather };
constexpr int kMostForms = 7;
constexpr int kPlainForm = kMostUnrolled + 1;
static_assert(kMostForms > kPlainForm && kMostForms > kPackGather);

// Of a kernel that keeps K and V: its forms.
enum ResidentForm { kResidentFull, kResidentCausal, kResidentRaggedFull, kResidentRaggedCausal, kResidentForms };

// Kernels of which there is one: what lists the row tiles of ragged batches, cuts the work of decode, writes tokens to
// pages, chooses sequences for prefill, packs masks, and merges partial results.
enum class Single { plan, cut, append, route, pack_mask, merge };
constexpr int kSingles = 6;

// The handle of a kernel for launches on `device`, which must be current. What is loaded once stays loaded, and is
// found again without a lock. May be called from any thread, and while streams are captured, in whatever mode. Throws
// std::runtime_error, with the remedy, where the file is missing or of another build, or the kernel is not in it or
// cannot be loaded.
cudaKernel_t kernel_of(const VariantEntry& variant, int form, int device);
cudaKernel_t kernel_of(const PackEntry& pack, PackForm form, int device);
cudaKernel_t kernel_of(const DecodeEntry& decode, int device);
cudaKernel_t kernel_of(const ResidentEntry& resident, ResidentForm form, int device);
cudaKernel_t kernel_of(Single single, int device);

// Loads all forms of a variant, of a ragged one the plan, and of lists of tiles the one that packs masks, so that no
// launch has to.
void load_kernels(const VariantEntry& variant, int device);
void load_kernels(const PackEntry& pack, int device);
void load_kernels(const DecodeEntry& decode, int device);  // and the one that cuts its work
void load_kernels(const ResidentEntry& resident, int device);

// Whether there is such a form of a source, and what the compiler calls it in its cubin. Sources are numbered:
// variants, packs, kernels of decode, those of Single, those that keep K and V.
bool has_kernel(int source, int form);
std::string kernel_name(int source, int form);

}  // namespace fp8cutlass
