// What a kernel that copies FP8 operands is launched with.
#pragma once

#include <cstdint>

#include "fp8cutlass/pack_params.h"

namespace fp8cutlass {

// FP8 operands: what an attention kernel reads of them is copied to where it reads it. Bytes stay as they are, but for
// the sign of Q, and where Q is lowered: its rows are divided by powers of two (lower.cuh), which their descales take
// back. So e4m3 of any range has scores that f16 holds. Only what becomes subnormal is rounded.
struct Fp8Operand {
  const uint8_t* x;  // (B, heads, tokens, D), strides in bytes, last dimension contiguous, 16-byte aligned rows
  int64_t stride_batch, stride_head, stride_row;
  uint8_t* out;  // Q and K: (B, heads, tokens, head_dim), contiguous; V: (B, heads, head_dim, rows), packed, contiguous
  int heads, tokens;
  int rows;       // tokens, or what V is padded to
  uint32_t flip;  // XORed onto four bytes
  int lowers;     // Q alone: whether its rows are lowered
  int block;      // of packed V of a ragged batch: keys that share a descale, a multiple of 64; else 0
  int blocks,
      ctas;  // what is a CTA's, of a head, and CTAs in all, 0 where the operand is read as it lies; set by the launch
};

// Descales that are not in memory as an attention kernel reads them: (batch, heads, parts) of one number, or of a
// tensor with any strides. `batch` counts the sequences of a ragged batch. Those of lowered operands are written with
// their rows.
struct Fp8Descale {
  const float* x;  // or null: `value`
  float value;
  int64_t stride_batch, stride_head, stride_part;
  float* out;  // contiguous
  int heads, parts;
  int given;  // of the parts; the rest become ones
  int count;  // in all, 0 where they are read as they lie, or written with their rows
};

// Of a ragged batch: a CTA has two pieces, blocks or rows of an operand, or one where two would leave room for few
// CTAs.
constexpr int kMostPieces = 2, kPiecesBytes = 128;  // and what they have in shared memory beside their rows

struct PieceRoom {
  int memory;  // shared memory of a CTA with two
  int rows;    // of a block at most
};
constexpr PieceRoom kRoomOnHopper{72 * 1024, 256}, kRoomOnAda{48 * 1024, 128};

// `rows` is the most of any piece of a launch.
constexpr int pieces_of(PieceRoom room, int row_bytes, int rows) {
  return kPiecesBytes + kMostPieces * row_bytes * rows <= room.memory ? kMostPieces : 1;
}
constexpr int pieces_bytes(PieceRoom room, int row_bytes, int rows) {
  return kPiecesBytes + pieces_of(room, row_bytes, rows) * row_bytes * rows;
}

// Of any launch.
constexpr int most_pieces_bytes(PieceRoom room, int row_bytes) {
  int most = 0;
  for (int rows = 128; rows <= room.rows; rows += 64) {
    const int bytes = pieces_bytes(room, row_bytes, rows);
    most = bytes > most ? bytes : most;
  }
  return most;
}

struct Fp8PackParams {
  Fp8Operand operand[kPackOperands];
  Fp8Descale descale[kPackOperands];
  int batch;
  int head_dim;   // D, a multiple of 16, at most the kernel's
  int first_cta;  // that looks after descales; set by the launch
  int pieces;     // of a CTA of a ragged batch; set by the launch
};

}  // namespace fp8cutlass
