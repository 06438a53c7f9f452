// What is compiled: a row for each kernel, which the generator writes in the manifest's order. A row has all that the
// host must know to launch the kernel; the code lies beside the library (kernels.h). Plain C++ without CUDA or torch.
#pragma once

#include "fp8cutlass/pack_fp8_params.h"
#include "fp8cutlass/params.h"
#include "fp8cutlass/walk/mask.h"

namespace fp8cutlass {

// How a kernel is launched. sm89: a persistent grid that gets pointers. sm90a: tensor maps, draws, clusters.
enum class Family { sm89, sm90a };

struct KeyRange {
  int least, most;
  bool plain;  // for calls without LSE, sinks and amax alone
};

// Of a kernel: the forms for some numbers of keys, in which an item's tiles are unrolled.
constexpr int kMostUnrolled = 4;

struct VariantEntry {
  const char* id;
  Family family;
  int head_dim, tile_m, tile_n;
  int slot_keys;  // keys of a slot of K or V in shared memory; of the family sm89 the tile's
  int threads, smem_bytes, ctas_per_sm;
  int parts;  // column parts of P V
  int split;  // CTAs that share an item
  Mask mask;
  OutType out;
  Granularity q, k, v;
  bool diagnostic;
  int key_block;                     // keys that share a block descale of K and V
  bool coarse;                       // reads descales by steps, so that coarser ones serve as well
  bool draws;                        // its CTAs draw work items from ForwardParams::counters
  bool quantises_q;                  // takes Q in bf16 and fp16, too
  bool ragged;                       // walks a ragged batch, and no other
  KeyRange unrolled[kMostUnrolled];  // those that there are; the rest zeros
  bool plain;                        // has a form for any number of keys that is plain
  bool capped;                       // bends scores by a tanh
  bool biased;                       // adds a tensor to scaled scores
};

enum class SourceType { bf16, fp16, fp8 };

struct PackEntry {
  const char* id;
  int head_dim;
  int key_block;  // keys that share a block descale of K and V
  SourceType source;
  int rows;         // of a CTA
  int ctas;         // that share a block of keys
  int stage_bytes;  // shared memory of a CTA
  // Of the form that hands over to an attention kernel that runs already; all 0 where there is none.
  int delivery_threads, delivery_bytes, delivery_ctas_per_sm;
  bool ragged;     // whether it has a form for ragged batches
  bool integer;    // Q and K become s8
  bool integer_v;  // V, too

  bool quantises() const { return source != SourceType::fp8; }
  bool delivers() const { return delivery_threads > 0; }
};

// A kernel of decode, for one target.
struct DecodeEntry {
  const char* id;
  const char* target;
  int head_dim;
  int rows;  // of a unit
  int tile;  // keys of a CTA at a time
  int threads, smem_bytes, ctas_per_sm;
  int part_floats;  // of what a CTA leaves of a unit that it shares
};

// A kernel that keeps a head's K and V in shared memory, for sm90a. Softmax is linear, and its forms are
// masks (ResidentForm).
struct ResidentEntry {
  const char* id;
  SourceType source;  // of Q, K, V and O
  int head_dim;
  int keys;  // the most
  int tile;  // keys of a tile, and of a block descale
  int threads, smem_bytes, ctas_per_sm;
};

// An architecture that kernels are compiled for, and the compute capability of the cards that run its code.
struct TargetEntry {
  const char* name;
  int major, minor;
};

// Defined in the generated registry, in manifest order.
extern const VariantEntry kVariants[];
extern const int kVariantCount;
extern const PackEntry kPacks[];
extern const int kPackCount;
extern const DecodeEntry kDecodes[];
extern const int kDecodeCount;
extern const ResidentEntry kResidents[];
extern const int kResidentCount;
extern const TargetEntry kTargets[];
extern const int kTargetCount;
extern const char kManifest[];  // SHA-256 of the manifest, in hex

}  // namespace fp8cutlass
