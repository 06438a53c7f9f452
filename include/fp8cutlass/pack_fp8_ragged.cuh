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

// Rows of Q, or of K that stays as it is; a block of V, or of lowered K.
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

// Works on a piece of K or Q, whose rows stay rows. `largest`: of all of K's, as larger_bytes has them.
template <class Rows, int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void store_rows(const Fp8PackParams& p, const RaggedPack& ragged, const Piece& piece,
                                           const uint8_t* own, uint32_t largest) {
  const Block& block = piece.block;
  const Fp8Rows& of = piece.of;
  const Fp8Operand& o = p.operand[block.operand];
  const Fp8Descale& d = p.descale[block.operand];
  uint8_t* const head = o.out + int64_t{block.head} * o.rows * kHeadDim;
  if (o.limit > 0 && block.operand == kPackQ) {
    uint4 x[kPasses][kChunks];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        x[pass][i] = *reinterpret_cast<const uint4*>(own + pass * Rows::kStepBytes + i * Rows::kChunkBytes);
    lower_rows<kLanes>(x, o, d, of, block.head, [&](int row) { return sequence_of(ragged, d.stride_batch, row); });
    store_bytes<kHeadDim, kLanes>(head, x, of.base, of.tokens, o.flip);
    return;
  }
  uint8_t* const out = head + int64_t{of.to} * kHeadDim + Rows::column();
  const auto store = [&](int row, int i, const uint4& x) {
    *reinterpret_cast<uint4*>(out + row * kHeadDim + i * Rows::kChunkBytes) = x;
  };
  if (o.limit > 0) {
    const int octaves = octaves_above(largest, o.limit);
    if (octaves == 0) {
      Rows::each(own, piece.rows, store);
    } else {
      Rows::each(own, piece.rows, [&](int row, int i, uint4 x) {
        divide(x, octaves);
        store(row, i, x);
      });
    }
    if (threadIdx.x == 0)
      d.out[int64_t{block.head} * d.parts + block.index] =
          given_descale(d, of.batch, of.head, block.index) * power_of_two(octaves);
    return;
  }
  Rows::each(own, piece.rows, [&](int row, int i, const uint4& x) {
    if (of.base + row < of.tokens) store(row, i, uint4{x.x ^ o.flip, x.y ^ o.flip, x.z ^ o.flip, x.w ^ o.flip});
  });
}

// Of a CTA.
struct Pieces {
  Piece pieces[kMostPieces];
  uint32_t words[kMostPieces][kThreads / 32];  // of each warp
};
static_assert(sizeof(Pieces) <= kPiecesBytes);

// The CTA's pieces. `memory`: Pieces, and rows of as many as p says, each as large as any of the launch.
template <class Stage, int kHeadDim, int kLanes, int kPasses, int kChunks>
__device__ __forceinline__ void pack_pieces(const Fp8PackParams& p, const RaggedPack& ragged, uint8_t* memory) {
  using Rows = Slot<Stage, kHeadDim, kLanes, kChunks>;
  constexpr int kRows = Rows::kStep * kPasses;
  auto& [pieces, words] = *reinterpret_cast<Pieces*>(memory);
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
    const bool lowers_block = piece.block.operand == kPackK && o.limit > 0;
    uint32_t largest = 0;
    if (lowers_block) {
      Rows::each(own, piece.rows, [&](int, int, const uint4& x) { largest = larger_bytes(x, largest); });
#pragma unroll
      for (int step = 16; step > 0; step /= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
      if (threadIdx.x % 32 == 0) words[n][warp] = largest;
    }
    __syncthreads();  // the rows and the words of all threads are there
    delay_point(28);
    if (piece.block.operand == kPackV) {
      uint8_t* const out = o.out + int64_t{piece.block.head} * kHeadDim * o.rows + piece.of.to;
      if (piece.rows > kRows)
        store_packed<Stage, 2 * kRows, kHeadDim>(out, o.rows, piece.rows, slot);
      else
        store_packed<Stage, kRows, kHeadDim>(out, o.rows, piece.rows, slot);
      continue;
    }
    if (lowers_block) {
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) largest = __vmaxu2(largest, words[n][w]);
    }
    store_rows<Rows, kHeadDim, kLanes, kPasses, kChunks>(p, ragged, piece, own, largest);
  }
}

}  // namespace fp8cutlass::packing
