#include "launch_pack.h"

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "fp8cutlass/sm90/kernel_params.h"
#include "kernels.h"
#include "start.h"
#include "tensor_map.h"

namespace fp8cutlass {

namespace {

// How many CTAs each operand has.
cudaError_t count_ctas(const PackEntry& pack, PackParams& params) {
  const int block = pack.rows * pack.ctas;
  for (PackOperand& o : params.operand) {
    if (o.rows > INT32_MAX - block) return cudaErrorInvalidValue;  // the rows of a block past the end are 32-bit
    o.blocks = (o.rows + block - 1) / block * pack.ctas;
    const int64_t ctas = int64_t{params.batch} * o.heads * o.blocks;
    if (ctas > INT32_MAX) return cudaErrorInvalidValue;
    o.ctas = static_cast<int>(ctas);
  }
  return cudaSuccess;
}

int64_t ctas_of(const PackParams& params) {
  int64_t ctas = 0;
  for (const PackOperand& o : params.operand) ctas += o.ctas;
  return ctas;
}

cudaError_t launch_blocks(const PackEntry& pack, PackForm form, PackParams& params, int smem_bytes, int device,
                          cudaStream_t stream) {
  const int64_t ctas = ctas_of(params);
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  void* arguments[] = {&params};
  return start(kernel_of(pack, form, device), {ctas, kPackThreads, smem_bytes}, arguments, stream, context_id());
}

cudaError_t launch_passes(const PackEntry& pack, PackParams& params, int device, cudaStream_t stream) {
  cudaError_t status = count_ctas(pack, params);
  if (status != cudaSuccess) return status;
  PackParams first = params;  // of the maxima
  for (PackOperand& o : first.operand) {
    if (o.amax == nullptr) o.ctas = 0;
  }
  const bool transforms = params.k_mean != nullptr || params.hadamard;
  status = launch_blocks(pack, transforms ? kPackMaximaTransform : kPackMaxima, first,
                         transforms ? pack.stage_bytes : 0, device, stream);
  if (status != cudaSuccess) return status;
  return launch_blocks(pack, transforms ? kPackTransform : kPackPlain, params, pack.stage_bytes, device, stream);
}

// The last CTAs look for rows of O that belong to no sequence.
cudaError_t launch_batch(const PackEntry& pack, PackParams& params, RaggedPack& ragged, int device,
                         cudaStream_t stream) {
  const cudaError_t status = count_ctas(pack, params);
  if (status != cudaSuccess) return status;
  int64_t ctas = ctas_of(params);
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  ragged.first_cta = static_cast<int>(ctas);
  ctas += (ragged.tokens / kPackThreads + pack.ctas) / pack.ctas * pack.ctas;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  void* arguments[] = {&params, &ragged};
  return start(kernel_of(pack, kPackRagged, device), {ctas, kPackThreads, pack.stage_bytes}, arguments, stream,
               context_id());
}

// How many pieces each operand has, and all together: more than 32 bits count where there are too many. A piece is a
// block where keys are in blocks, else `pack.rows`.
int64_t count_copies(const PackEntry& pack, Fp8PackParams& params) {
  int64_t ctas = 0;
  for (Fp8Operand& o : params.operand) {
    if (o.x == nullptr || o.rows == 0) continue;
    if (o.rows > INT32_MAX - pack.rows) return INT64_MAX / 2;  // the rows of a block past the end are 32-bit
    const int rows = o.block > 0 ? o.block : pack.rows;
    o.blocks = (o.rows + rows - 1) / rows;
    const int64_t own = int64_t{params.batch} * o.heads * o.blocks;
    if (own > INT32_MAX) return INT64_MAX / 2;
    o.ctas = static_cast<int>(own);
    ctas += own;
  }
  return ctas;
}

// The last CTAs look for rows of O that belong to no sequence.
cudaError_t launch_ragged_copies(const PackEntry& pack, Fp8PackParams& params, RaggedPack& ragged, int device,
                                 cudaStream_t stream) {
  const int64_t pieces = count_copies(pack, params);
  const int rows = std::max(pack.rows, params.operand[kPackV].block), row_bytes = pack.stage_bytes / pack.rows;
  const PieceRoom room = runs_kernels_beside(device) ? kRoomOnHopper : kRoomOnAda;
  params.pieces = pieces_of(room, row_bytes, rows);
  const int64_t copies = (pieces + params.pieces - 1) / params.pieces, ctas = copies + ragged.tokens / kPackThreads + 1;
  if (pieces > INT32_MAX - kMostPieces || ctas > INT32_MAX) return cudaErrorInvalidValue;
  ragged.first_cta = static_cast<int>(copies);
  void* arguments[] = {&params, &ragged};
  const LaunchShape shape{ctas, kPackThreads, pieces_bytes(room, row_bytes, rows), most_pieces_bytes(room, row_bytes)};
  return start(kernel_of(pack, kPackRagged, device), shape, arguments, stream, context_id());
}

cudaError_t launch_copies(const PackEntry& pack, Fp8PackParams& params, int device, cudaStream_t stream) {
  constexpr int64_t kOfCta = 4 * kPackThreads, kMostCtas = 256;  // of descales, which are few
  int64_t ctas = count_copies(pack, params), descales = 0;
  for (const Fp8Descale& d : params.descale) descales += d.count;
  if (ctas > INT32_MAX - kMostCtas) return cudaErrorInvalidValue;
  params.first_cta = static_cast<int>(ctas);
  ctas += std::min((descales + kOfCta - 1) / kOfCta, kMostCtas);
  if (ctas == 0) return cudaSuccess;
  void* arguments[] = {&params};
  return start(kernel_of(pack, kPackPlain, device), {ctas, kPackThreads, pack.stage_bytes}, arguments, stream,
               context_id());
}

cudaError_t launch_delivery(const PackEntry& pack, PackParams& p, int device, cudaStream_t stream) {
  if (!has_tensor_maps()) return cudaErrorNotSupported;
  sm90::DeliverParams params{};
  const unsigned long long context = context_id();
  const MapMaker maps(context);
  for (int i = 0; i < sm90::kDelivered; ++i) {
    PackOperand& o = p.operand[i];
    if (o.rows > INT32_MAX - pack.rows) return cudaErrorInvalidValue;  // the rows of a block past the end are 32-bit
    o.blocks = (o.rows + pack.rows - 1) / pack.rows;
    const MapMaker::Rows rows{o.x,     2 * p.head_dim,   o.tokens,          o.heads,
                              p.batch, 2 * o.stride_row, 2 * o.stride_head, 2 * o.stride_batch};
    if (!maps.rows(params.source[i], rows, 2 * pack.head_dim, pack.rows, params.head_step[i], params.batch_step[i]))
      return cudaErrorInvalidPitchValue;
  }
  const PackOperand& v = p.operand[kPackV];
  if (!maps.values(params.values, v.out, v.rows, pack.head_dim, int64_t{p.batch} * v.heads, pack.rows, pack.head_dim))
    return cudaErrorInvalidPitchValue;
  Handover& h = p.handover;
  const int ctas = std::min(h.sm_count * pack.delivery_ctas_per_sm, h.blocks / sm90::kDeliveryRun);
  h.kept_ctas = h.keep * pack.delivery_ctas_per_sm;
  params.p = p;
  void* arguments[] = {&params};
  return start(kernel_of(pack, kPackDeliver, device), {ctas, pack.delivery_threads, pack.delivery_bytes}, arguments,
               stream, context);
}

}  // namespace

void launch(const PackEntry& pack, PackParams params, int device, cudaStream_t stream) {
  const bool delivers = params.handover.ready != nullptr;
  check_launch(delivers ? launch_delivery(pack, params, device, stream) : launch_passes(pack, params, device, stream),
               pack.id, device);
}

void launch_fp8(const PackEntry& pack, Fp8PackParams params, int device, cudaStream_t stream) {
  check_launch(launch_copies(pack, params, device, stream), pack.id, device);
}

void launch_fp8_ragged(const PackEntry& pack, Fp8PackParams params, RaggedPack ragged, int device,
                       cudaStream_t stream) {
  check_launch(launch_ragged_copies(pack, params, ragged, device, stream), pack.id, device);
}

void launch_ragged(const PackEntry& pack, PackParams params, RaggedPack ragged, int device, cudaStream_t stream) {
  check_launch(launch_batch(pack, params, ragged, device, stream), pack.id, device);
}

}  // namespace fp8cutlass
