// How FP8 operands of a ragged batch are brought to where attention kernels read them. A CTA has one or two pieces,
// rows of one head of one operand. It asks for all of them before it works on the first, as memory takes longer than
// the work.
#pragma once

#include "fp8cutlass/pack_fp8.cuh"

namespace fp8cutlass::packing {

// Rows in shared memory. Each thread copies chunks of its own, those of load_bytes, and reads them again. `own` is
// where the first of them lies.
template <class Stage, int kHeadDim, int kLanes, int kChunks>
struct Slot {
  static constexpr int kStep = kThreads / kLanes;  // rows from one of a thread to the next
  static constexpr int kStepBytes = kStep / 16 * Stage::kGroupBytes, kChunkBytes = 16 * kLanes;
  static constexpr int kUnroll = kStep < 64 ? 64 / kStep : 1;  // pieces have a multiple of 64 rows
  static_assert(kStep % 16 == 0);

  static __device__ __forceinline__ int row() { return int(threadIdx.x / kLanes); }
  static __device__ __forceinline__ int column() { return int(threadIdx.x % kLanes) * 16; }
  static __device__ __forceinline__ uint8_t* own(uint8_t* slot) {
    return slot + Stage::offset(row(), row() % 16, column());
  }

  // Calls use(row, i, chunk) for each chunk of the thread in the first `rows`.
  template <class Use>
  static __device__ __forceinline__ void each(const uint8_t* own, int rows, const Use& use) {
#pragma unroll 1
    for (int first = row(); first < rows; first += kUnroll * kStep, own += kUnroll * kStepBytes)
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
          use(first + u * kStep, i, *reinterpret_cast<const uint4*>(own + u * kStepBytes + i * kChunkBytes));
  }

  // Asks for them. Rows past the last token and columns past D are zeros.
  static __device__ __forceinline__ void fetch(uint8_t* own, const Fp8Operand& o, const Fp8Rows& of, int rows,
                                               int head_dim) {
    const uint8_t* from = of.rows + (of.base + row()) * o.stride_row + column();
    const int64_t step = kStep * o.stride_row;
    const int tokens = of.tokens - of.base;
#pragma unroll 1
    for (int first = row(); first < rows; first += kUnroll * kStep, own += kUnroll * kStepBytes)
#pragma unroll
      for (int u = 0; u < kUnroll; ++u, from += step)
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const bool inside = first + u * kStep < tokens && column() + i * kChunkBytes < head_dim;
          decode::copy16(own + u * kStepBytes + i * kChunkBytes, from + i * kChunkBytes, inside ? 16 : 0);
        }
  }
};

// Rows of Q or K, or a block of V.
struct Piece {
  Block block;
  Fp8Rows of;
  int rows;  // of the slot
};

// Number `number` of all: of all heads of an operand, then of the next rows. Heads lie side by side, and are read
// together. A warp comes here together.
__device__ __forceinline__ Piece find_piece(const Fp8PackParams& p, const RaggedBatch& batch, int number, int rows) {
  int operand = 0;
  while (number >= p.operand[operand].ctas) number -= p.operand[operand++].ctas;
  const Fp8Operand& o = p.operand[operand];
  const Block block{operand, number % o.heads, number / o.heads};
  if (o.block == 0) return {block, rows_of(o, block, rows), rows};
  const BlockKeys keys = keys_of_block(batch, block.index, o.block);
  return {block,
          {o.x + block.head * o.stride_head + keys.first * o.stride_row, keys.begin, keys.count, block.index * o.block,
           o.block, keys.sequence, block.head},
          o.block};
}

// Works on a piece of K or Q, whose rows stay rows.
template <class Rows, int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void store_rows(const Fp8PackParams& p, const RaggedPack& ragged, const Piece& piece,
                                           const uint8_t* own) {
  const Block& block = piece.block;
  const Fp8Rows& of = piece.of;
  const Fp8Operand& o = p.operand[block.operand];
  uint8_t* const head = o.out + int64_t{block.head} * o.rows * kHeadDim;
  if (o.lowers) {
    const Fp8Descale& d = p.descale[block.operand];
    uint4 x[kPasses][kChunks];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        x[pass][i] = *reinterpret_cast<const uint4*>(own + pass * Rows::kStepBytes + i * Rows::kChunkBytes);
    lower_rows<kLanes>(x, d, of, block.head, [&](int row) { return sequence_of(ragged, d.stride_batch, row); });
    store_bytes<kHeadDim, kLanes>(head, x, of.base, of.tokens, o.flip);
    return;
  }
  uint8_t* const out = head + int64_t{of.to} * kHeadDim + Rows::column();
  Rows::each(own, piece.rows, [&](int row, int i, const uint4& x) {
    if (of.base + row < of.tokens)
      *reinterpret_cast<uint4*>(out + row * kHeadDim + i * Rows::kChunkBytes) =
          uint4{x.x ^ o.flip, x.y ^ o.flip, x.z ^ o.flip, x.w ^ o.flip};
  });
}

// The CTA's pieces. `memory`: what they are, and rows of as many as p says, each as large as any of the launch.
template <class Stage, int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void pack_pieces(const Fp8PackParams& p, const RaggedPack& ragged, uint8_t* memory) {
  using Rows = Slot<Stage, kHeadDim, kLanes, kChunks>;
  constexpr int kRows = Rows::kStep * kPasses;
  Piece* const pieces = reinterpret_cast<Piece*>(memory);
  static_assert(kMostPieces * sizeof(Piece) <= kPiecesBytes);
  memory += kPiecesBytes;
  int all = 0;
#pragma unroll
  for (int operand = 0; operand < kPackOperands; ++operand) all += p.operand[operand].ctas;
  const int first = int(blockIdx.x) * p.pieces, count = min(p.pieces, all - first), warp = int(threadIdx.x / 32);
  if (warp < count) {
    const Piece piece = find_piece(p, ragged.batch, first + warp, kRows);
    if (threadIdx.x % 32 == 0) pieces[warp] = piece;
  }
  __syncthreads();
  delay_point(26);
  const int slot_bytes = max(kRows, p.operand[kPackV].block) / 16 * Stage::kGroupBytes;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const Piece& piece = pieces[n];
    Rows::fetch(Rows::own(memory + n * slot_bytes), p.operand[piece.block.operand], piece.of, piece.rows, p.head_dim);
    decode::commit();
  }
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const Piece& piece = pieces[n];
    const Fp8Operand& o = p.operand[piece.block.operand];
    uint8_t* const slot = memory + n * slot_bytes;
    const uint8_t* const own = Rows::own(slot);
    if (n + 1 < count)
      decode::wait<1>();
    else
      decode::wait<0>();
    __syncthreads();  // the rows of all threads are there
    delay_point(28);
    if (piece.block.operand == kPackV) {
      uint8_t* const out = o.out + int64_t{piece.block.head} * kHeadDim * o.rows + piece.of.to;
      if (piece.rows > kRows)
        store_packed<Stage, 2 * kRows, kHeadDim>(out, o.rows, piece.rows, slot);
      else
        store_packed<Stage, kRows, kHeadDim>(out, o.rows, piece.rows, slot);
      continue;
    }
    store_rows<Rows, kHeadDim, kLanes, kPasses, kChunks>(p, ragged, piece, own);
  }
}

}  // namespace fp8cutlass::packing
