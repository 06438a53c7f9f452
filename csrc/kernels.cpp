#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "kernel_file.h"

#ifndef FP8CUTLASS_BUILD
#error "FP8CUTLASS_BUILD names the build that the files of kernels belong to: scripts/build_extension.py gives it"
#endif

namespace fp8cutlass {

namespace {

// In the order of Single: the id, and the function and its parameters as the compiler spells them.
struct SingleName {
  const char *id, *function, *parameters;
};
constexpr SingleName kSingleNames[kSingles] = {
    {"plan", "8planning4plan", "ENS0_10PlanParamsE"},
    {"cut", "3cut", "ENS_6decode9CutParamsE"},
    {"append", "6append", "ENS_9appending12AppendParamsE"},
    {"route", "5route", "ENS_7prefill11RouteParamsE"},
    {"pack_mask", "9pack_mask", "ENS_7masking14PackMaskParamsE"},
    {"merge", "5merge", "ENS_7merging11MergeParamsE"},
};

constexpr const char* kResidentNames[kResidentForms] = {"_full", "_causal", "_ragged_full", "_ragged_causal"};

// Sources are numbered: variants, packs, kernels of decode, those of Single, those that keep K and V.
int source_of(const VariantEntry& variant) { return static_cast<int>(&variant - kVariants); }
int source_of(const PackEntry& pack) { return kVariantCount + static_cast<int>(&pack - kPacks); }
int source_of(const DecodeEntry& decode) { return kVariantCount + kPackCount + static_cast<int>(&decode - kDecodes); }
int first_single() { return kVariantCount + kPackCount + kDecodeCount; }
int source_of(Single single) { return first_single() + static_cast<int>(single); }
int first_resident() { return first_single() + kSingles; }
int source_of(const ResidentEntry& resident) { return first_resident() + static_cast<int>(&resident - kResidents); }
int source_count() { return first_resident() + kResidentCount; }

std::string id_of(int source) {
  const int pack = source - kVariantCount, decode = pack - kPackCount;
  return pack < 0                    ? kVariants[source].id
         : decode < 0                ? kPacks[pack].id
         : decode < kDecodeCount     ? kDecodes[decode].id
         : source < first_resident() ? kSingleNames[source - first_single()].id
                                     : kResidents[source - first_resident()].id;
}

// A function of this namespace as the compiler spells it. The names are those of C++, as nvcc makes other code of
// functions with names of C.
std::string spelled(const std::string& name, const char* parameters) {
  return "_ZN10fp8cutlass" + std::to_string(name.size()) + name + parameters;
}

// What the function is called in its cubin.
std::string name_of(int source, int form) {
  const std::string id = id_of(source);
  if (source >= first_resident()) {
    return spelled(id + kResidentNames[form], "ENS_4sm9014ResidentLaunchE");
  }
  if (source >= first_single()) {
    const SingleName& single = kSingleNames[source - first_single()];
    return std::string("_ZN10fp8cutlass") + single.function + single.parameters;
  }
  if (source >= kVariantCount + kPackCount) return spelled(id, "ENS_6decode12DecodeParamsE");
  if (source < kVariantCount) {
    const VariantEntry& variant = kVariants[source];
    std::string name = id;
    if (form == kPlainForm)
      name += "_plain";
    else if (form > 0)
      name += "_keys" + std::to_string(variant.unrolled[form - 1].most);
    const bool listed = variant.mask == Mask::blocks;
    return spelled(name, variant.family == Family::sm90a ? "ENS_4sm9012KernelParamsE"
                         : listed                        ? "ENS_13ForwardParamsEiNS_8TileMaskE"
                         : variant.biased                ? "ENS_13ForwardParamsEiNS_4BiasE"
                                                         : "ENS_13ForwardParamsEi");
  }
  switch (form) {
    case kPackPlain:
      if (!kPacks[source - kVariantCount].quantises()) return spelled(id, "ENS_13Fp8PackParamsE");
      return spelled(id, "ILb0EEEvNS_10PackParamsE");
    case kPackTransform:
      return spelled(id, "ILb1EEEvNS_10PackParamsE");
    case kPackMaxima:
      return spelled(id + "_amax", "ILb0EEEvNS_10PackParamsE");
    case kPackMaximaTransform:
      return spelled(id + "_amax", "ILb1EEEvNS_10PackParamsE");
    case kPackDeliver:
      return spelled(id + "_deliver", "ENS_4sm9013DeliverParamsE");
    case kPackGather:
      return spelled(id + "_gather", "ENS_7prefill12GatherParamsE");
    default:
      return spelled(id + "_ragged", kPacks[source - kVariantCount].quantises()
                                         ? "ENS_10PackParamsENS_10RaggedPackE"
                                         : "ENS_13Fp8PackParamsENS_10RaggedPackE");
  }
}

// The folder of this library.
std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    fail("the library cannot find out where it lies");
  const std::unique_ptr<char, void (*)(void*)> resolved(realpath(info.dli_fname, nullptr), std::free);
  const std::string path = resolved ? resolved.get() : info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// The code for one architecture.
struct Code {
  Code(const char* folder, const char* target)
      : file(std::string(folder) + "/_built/kernels-" + target + ".bin", target, FP8CUTLASS_BUILD),
        libraries(source_count()) {}
  KernelFile file;
  std::vector<cudaLibrary_t> libraries;  // of each source; null until it is needed
};

// The kernels that are loaded on a device.
struct Loaded {
  Code* code;
  std::unique_ptr<std::atomic<cudaKernel_t>[]> kernels;
};

constexpr int kCachedDevices = 64;  // more than one host holds; devices past it are found under the lock
std::mutex mutex;                   // of all that follows, but for reading what is atomic
std::array<std::atomic<Loaded*>, kCachedDevices> of_device{};

// Null where nothing is compiled for the device. Leaked, as the driver may be gone before static objects are.
Code* code_for(int device) {
  static auto* const codes = new std::map<std::string, std::unique_ptr<Code>>;
  static const std::string folder = own_folder();
  const Capability capability = capability_of(device);
  for (int i = 0; i < kTargetCount; ++i) {
    if (kTargets[i].major != capability.major || kTargets[i].minor != capability.minor) continue;
    std::unique_ptr<Code>& code = (*codes)[kTargets[i].name];
    if (!code) code = std::make_unique<Code>(folder.c_str(), kTargets[i].name);
    return code.get();
  }
  return nullptr;
}

Loaded& loaded_on(int device, const std::string& id) {
  static auto* const devices = new std::map<int, Loaded>;
  Loaded& loaded = (*devices)[device];
  if (loaded.code == nullptr) {
    Code* const code = code_for(device);
    if (code == nullptr) check_launch(cudaErrorNoKernelImageForDevice, id.c_str(), device);
    loaded.kernels = std::make_unique<std::atomic<cudaKernel_t>[]>(size_t(source_count()) * kMostForms);
    for (int i = 0; i < source_count() * kMostForms; ++i) loaded.kernels[i].store(nullptr, std::memory_order_relaxed);
    loaded.code = code;
    if (device < kCachedDevices) of_device[device].store(&loaded, std::memory_order_release);
  }
  return loaded;
}

cudaKernel_t load(int source, int form, int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string id = id_of(source), name = name_of(source, form);
  Loaded& loaded = loaded_on(device, id);
  std::atomic<cudaKernel_t>& place = loaded.kernels[size_t(source) * kMostForms + form];
  if (cudaKernel_t loaded_before = place.load(std::memory_order_relaxed)) return loaded_before;
  const KernelFile& file = loaded.code->file;
  const auto check = [&](cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    fail("kernel ", name, " of ", file.path(), " ", what, " on CUDA device ", device, ": ", cudaGetErrorString(status),
         " (", cudaGetErrorName(status),
         "): build or install the package again, with a CUDA toolkit that is not newer "
         "than the driver knows");
  };
  const RelaxedCapture relaxed;
  cudaLibrary_t& known = loaded.code->libraries[source];
  if (known == nullptr) {
    const std::vector<char> cubin = file.read(id);  // the driver keeps a copy
    cudaLibrary_t library = nullptr;
    check(cudaLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cannot be loaded");
    known = library;
  }
  cudaKernel_t kernel = nullptr;
  const cudaError_t found = cudaLibraryGetKernel(&kernel, known, name.c_str());  // which may be what loads a library
  check(found, found == cudaErrorSymbolNotFound ? "is not in its cubin" : "cannot be loaded");
  // Into the current context, which would otherwise be done by the first launch, perhaps in a capture.
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "cannot be loaded");
  place.store(kernel, std::memory_order_release);
  return kernel;
}

cudaKernel_t find(int source, int form, int device) {
  if (device < kCachedDevices) {
    if (const Loaded* const loaded = of_device[device].load(std::memory_order_acquire)) {
      const std::atomic<cudaKernel_t>& place = loaded->kernels[size_t(source) * kMostForms + form];
      if (cudaKernel_t known = place.load(std::memory_order_acquire)) return known;
    }
  }
  return load(source, form, device);
}

void load_forms(int source, int device) {
  for (int form = 0; form < kMostForms; ++form) {
    if (has_kernel(source, form)) find(source, form, device);
  }
}

}  // namespace

cudaKernel_t kernel_of(const VariantEntry& variant, int form, int device) {
  return find(source_of(variant), form, device);
}

cudaKernel_t kernel_of(const PackEntry& pack, PackForm form, int device) { return find(source_of(pack), form, device); }

cudaKernel_t kernel_of(const DecodeEntry& decode, int device) { return find(source_of(decode), 0, device); }

cudaKernel_t kernel_of(const ResidentEntry& resident, ResidentForm form, int device) {
  return find(source_of(resident), form, device);
}

cudaKernel_t kernel_of(Single single, int device) { return find(source_of(single), 0, device); }

bool has_kernel(int source, int form) {
  if (source < 0 || form < 0 || form >= kMostForms) return false;
  if (source < kVariantCount) {
    const VariantEntry& variant = kVariants[source];
    if (form == kPlainForm) return variant.plain;
    return form == 0 || (form <= kMostUnrolled && variant.unrolled[form - 1].most > 0);
  }
  if (source < kVariantCount + kPackCount) {
    const PackEntry& pack = kPacks[source - kVariantCount];
    if (form == kPackRagged) return pack.ragged;
    if (!pack.quantises()) return form == kPackPlain || (form == kPackGather && pack.ragged);
    if (form == kPackGather) return false;
    return form == kPackDeliver ? pack.delivers() : true;
  }
  if (source >= first_resident()) return source < source_count() && form < kResidentForms;
  return form == 0;
}

std::string kernel_name(int source, int form) { return name_of(source, form); }

void load_kernels(const VariantEntry& variant, int device) {
  load_forms(source_of(variant), device);
  if (variant.ragged) kernel_of(Single::plan, device);
  if (variant.mask == Mask::blocks) kernel_of(Single::pack_mask, device);
}

void load_kernels(const DecodeEntry& decode, int device) {
  load_forms(source_of(decode), device);
  kernel_of(Single::cut, device);
}

void load_kernels(const ResidentEntry& resident, int device) { load_forms(source_of(resident), device); }

void load_kernels(const PackEntry& pack, int device) { load_forms(source_of(pack), device); }

}  // namespace fp8cutlass
