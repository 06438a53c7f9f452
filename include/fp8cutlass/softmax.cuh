// Softmax of one tile, in place on the accumulators of one 16-row fragment (rows r = 0, 1 of a lane: group, group + 8).
//
// Every tile is anchored on its own row maximum and returns a log2 weight w for each row:
//     2^(s * c) = P * 2^w        with P the e4m3 value that goes into P V.
// Anchoring per tile gives each tile the full range of e4m3 and leaves no dependency from tile to tile.
#pragma once

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass {

constexpr float kDeadWeight = -1e30f;  // weight of a tile in which a row sees no key
constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// Slopes are held above zero, as -inf * 0 would be NaN, and finite with every score: 0x1p80 * 65504 is.
constexpr float kMinSlope = 0x1p-126f;
constexpr float kMinCodeSlope = 0x1p-24f;  // of slopes in codes, which become f16: its smallest number
constexpr float kMaxSlope = 0x1p80f;

// ---- scores f32, P = e4m3(2^x) --------------------------------------------------------------------------------------

// Per-token K descales: scores become comparable across the columns of a tile. `descale` points at its column 0.
template <int kBlocks>
__device__ __forceinline__ void scale_columns(float (&s)[kBlocks][4], const float* descale) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(descale + 8 * n + 2 * t);
    s[n][0] *= d.x, s[n][1] *= d.y, s[n][2] *= d.x, s[n][3] *= d.y;
  }
}

// Scores under a cap: what is left of them is the tanh, which the cap multiplies. slope[r]: logits over the cap, a
// score unit.
template <int kBlocks>
__device__ __forceinline__ void cap_scores(float (&s)[kBlocks][4], const float (&slope)[2]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = tanh_fast(s[n][i] * slope[i / 2]);
}

// Columns beyond last[r] (relative to the tile) become -inf.
template <class Score, int kBlocks>
__device__ __forceinline__ void mask_columns(Score (&s)[kBlocks][4], const int (&last)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * n + 2 * t + i % 2 > last[i / 2]) s[n][i] = kHiddenScore<Score>;
}

// The ends of a window, one at a time: columns beyond the edge and those before it, which is row 0's; of row 1, 8 rows
// below, it lies 8 columns further. `edge_at` makes an edge of a column, so that this can be done ahead.
template <int kBlocks, int kRegs>  // registers of a block
__device__ __forceinline__ int edge_at(int column) {
  if constexpr (kRegs == 2) {  // as f16, for both columns of a lane's first pair
    column = min(max(column, -9), 8 * kBlocks) - 2 * int(threadIdx.x % 4);
    return int(fp16x2(float(column), float(column - 1)));
  }
  return column;
}

// The column again, of f16 scores.
__device__ __forceinline__ float column_of(int edge) { return half_low(edge) + float(2 * (threadIdx.x % 4)); }

template <class Score, int kBlocks>
__device__ __forceinline__ void mask_after(Score (&s)[kBlocks][4], int edge) {
  const int last[2] = {edge, edge + 8};
  mask_columns(s, last);
}

template <class Score, int kBlocks>
__device__ __forceinline__ void mask_before(Score (&s)[kBlocks][4], int edge) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * n + 2 * t + i % 2 < edge + i / 2 * 8) s[n][i] = kHiddenScore<Score>;
}

// slope[r]: logits in octaves (log2) a score unit, > 0. If `want_exact`, `keep` is called with the sums of this lane's
// unquantised exponentials of both rows.
template <int kBlocks, class Keep>
__device__ __forceinline__ void softmax_exp2(float (&s)[kBlocks][4], const float (&slope)[2], float (&weight)[2],
                                             bool want_exact, const Keep& keep) {
  constexpr float kOffset = 8.f;  // the row maximum becomes 2^8: P uses 17 of e4m3's 18 octaves and cannot saturate
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = -INFINITY;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    m = quad_max(m);
    const bool dead = m == -INFINITY;
    offset[r] = kOffset - (dead ? 0.f : m) * slope[r];
    weight[r] = dead ? kDeadWeight : -offset[r];
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = exp2_approx(fmaf(s[n][i], slope[i / 2], offset[i / 2]));
  for (int turn = unpredicated(want_exact); turn > 0; --turn) {
    float exact[2] = {};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) exact[0] += s[n][0] + s[n][1], exact[1] += s[n][2] + s[n][3];
    keep(exact[0], exact[1]);
  }
}

// Exponentials to the A operands of P V. No shuffle: V's keys are packed in the order of the accumulator (layout.h).
template <int kBlocks>
__device__ __forceinline__ void pack_p(uint32_t (&p)[kBlocks / 4][4], const float (&s)[kBlocks][4]) {
#pragma unroll
  for (int step = 0; step < kBlocks / 4; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&x)[4] = s[4 * step + 2 * h], (&y)[4] = s[4 * step + 2 * h + 1];
      p[step][2 * h] = e4m3x4(x[0], x[1], y[0], y[1]);
      p[step][2 * h + 1] = e4m3x4(x[2], x[3], y[2], y[3]);
    }
}

// The same in two terms, a step of P V each: what the rounding to e4m3 left, then the e4m3 itself.
template <int kBlocks>
__device__ __forceinline__ void pack_p(uint32_t (&p)[kBlocks / 2][4], const float (&s)[kBlocks][4]) {
#pragma unroll
  for (int step = 0; step < kBlocks / 4; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&x)[4] = s[4 * step + 2 * h], (&y)[4] = s[4 * step + 2 * h + 1];
      uint32_t (&low)[4] = p[2 * step], (&high)[4] = p[2 * step + 1];
      e4m3x4_terms(low[2 * h], high[2 * h], x[0], x[1], y[0], y[1]);
      e4m3x4_terms(low[2 * h + 1], high[2 * h + 1], x[2], x[3], y[2], y[3]);
    }
}

// ---- scores f16, P by its e4m3 code ---------------------------------------------------------------------------------
//
// An e4m3 code is, to within the interpolation of one octave, a linear function of log2 P. With S in f16 pairs, one FMA
// with ReLU turns two scores into two codes u in [0, kTop]; adding 1024 (where f16 has an ulp of 1) leaves round(u) in
// the low byte.

constexpr uint32_t kHalf2MinusEight = half2_of(8) | 0x80008000u;
constexpr uint32_t kHalf2Integer = 0x64006400u;  // 1024, 1024
constexpr float kHalfMax = 65504.f;

// Inside an octave, 8 codes, the code of 2^(x / 8) lies below x: by B - B / 16 (f - 4)^2 with f = x mod 8 and B =
// 11/16, to within 0.03 of a code. `linear` leaves that; `quadratic` makes u = x - B and adds the square, in roundings
// that leave 0.08. Codes below 8, more than 14 octaves under kTop, are denormal and mean less than they should with
// both.
enum class Code { linear, quadratic };

template <Code kCode>
constexpr float kBelow = kCode == Code::linear ? 0.f : 11.f / 16;

// What u of a row's maximum is sent to. `linear`: 122 instead of 120, which is P = 2^8, because linear interpolation
// between powers of two is 4% high on average: the maximum is then biased like the rest. `quadratic`: code 120.
// How much larger than they should be P are on average, which a sink is not: (1 + x) / 2^x over an octave.
template <Code kCode>
constexpr float kExcess = kCode == Code::linear ? 1.0407f : 1.f;

template <Code kCode>
constexpr float kTop = kCode == Code::linear ? 122.f : 120.f - kBelow<kCode>;

// Codes of P, two in a word, each in the low byte of a half.
template <Code kCode>
__device__ __forceinline__ uint32_t code_of(uint32_t score, uint32_t a, uint32_t b) {
  uint32_t u = half2_fma_relu(score, a, b);
  if constexpr (kCode == Code::quadratic) {
    // u + 128.75, whose ulp is 1/8: the lowest 6 bits are 8 f, with f high by 1/16 on average.
    const uint32_t v = half2_add(u, 0x58065806u);
    const uint32_t g = (v & 0x003F003Fu) | kHalf2Integer;          // 1024 + 8 f
    const uint32_t root = half2_fma(g, 0x26A226A2u, 0xCED8CED8u);  // sqrt(11) / 16 (f - 4 - 1/16)
    u = half2_fma(root, root, u);
  }
  return half2_add(u, kHalf2Integer);
}

template <int kBlocks>
__device__ __forceinline__ void mask_columns(uint32_t (&s)[kBlocks][2], const int (&last)[2]) {
  // A pair is columns 8 n + 2 t and the next. Both are compared at once, as f16, which holds such numbers exactly.
  uint32_t limit[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int first = min(max(last[r], -1), 8 * kBlocks) - 2 * int(threadIdx.x % 4);  // 8 n is seen up to here
    limit[r] = fp16x2(float(first), float(first - 1));
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t beyond = half2_less(limit[r], half2_of(8 * n));
      s[n][r] = (s[n][r] & ~beyond) | (kHalf2NegInf & beyond);
    }
}

// The ends of a window, see above. What holds of a pair of row 0 holds of the next block's of row 1, so that one
// comparison serves both. Columns are compared with those of block -1 on.
template <int kBlocks>
__device__ __forceinline__ void mask_after(uint32_t (&s)[kBlocks][2], int edge) {
  uint32_t beyond = half2_less(edge, kHalf2MinusEight);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    s[n][1] = hide(s[n][1], beyond);
    beyond = half2_less(edge, half2_of(8 * n));
    s[n][0] = hide(s[n][0], beyond);
  }
}

// Its block 0 is block kFirst of the tile.
template <int kFirst = 0, int kBlocks>
__device__ __forceinline__ void mask_before(uint32_t (&s)[kBlocks][2], int edge) {
  uint32_t before = half2_less(kFirst == 0 ? kHalf2MinusEight : half2_of(8 * (kFirst - 1)), edge);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    s[n][1] = hide(s[n][1], before);
    before = half2_less(half2_of(8 * (kFirst + n)), edge);
    s[n][0] = hide(s[n][0], before);
  }
}

// kCount blocks of a tile as a tile of their own.
template <int kFirst, int kCount, int kBlocks>
__device__ __forceinline__ auto& blocks_of(uint32_t (&s)[kBlocks][2]) {
  return reinterpret_cast<uint32_t (&)[kCount][2]>(s[kFirst]);
}

// Slopes A and offsets B (f16, each twice) that send the row maxima f of a lane's two rows to kTop, and the log2
// weights. B is lowered by as much as rounding it can raise it, so that f * A + B never exceeds kTop; the weight is
// computed from the rounded A and B, so that rounding them costs no consistency between tiles. `limited` are the slopes
// to use, `slope` the true ones.
template <Code kCode>
__device__ __forceinline__ void anchor(const float (&f)[2], const float (&limited)[2], const float (&slope)[2],
                                       uint32_t (&a)[2], uint32_t (&b)[2], float (&weight)[2]) {
  constexpr float kHalfUlp = 0x1p-11f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    a[r] = fp16x2(limited[r], limited[r]);
    const float offset = fmaf(-f[r], half_low(a[r]), kTop<kCode>);
    const float lowered = fminf(fmaf(-fabsf(offset), kHalfUlp, offset), kHalfMax);
    b[r] = fp16x2(lowered, lowered);
    weight[r] = __fsub_rn(__fmul_rn(f[r], slope[r]), fmaf(f[r], half_low(a[r]), half_low(b[r]))) - kBelow<kCode>;
    // code c stands for 2^(c / 8 - 7)
    weight[r] = f[r] == -kHalfMax ? kDeadWeight : fmaf(weight[r], 0.125f, 7.f);
  }
}

constexpr float kCodeLimit = 65000.f;  // of a score's code: beyond, B would not be finite

// A slope with which no score comes to the limit: of operands quantised to amax 14, or of lowered rows (lower.cuh).
constexpr __host__ __device__ float safe_slope(int head_dim) { return kCodeLimit / (14 * 14 * head_dim); }

// slope[r]: logits in codes (1/8 octave) a score unit, at least kMinCodeSlope, at most kMaxSlope. seldom(beyond): the
// same for all lanes of a warp, positive where want_exact is set or a row of it may be beyond the limit.
template <Code kCode, int kBlocks, class Seldom, class Keep>
__device__ __forceinline__ void softmax_by_code(uint32_t (&s)[kBlocks][2], const float (&slope)[2], float (&weight)[2],
                                                bool want_exact, const Seldom& seldom, const Keep& keep) {
  uint32_t m[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = s[0][r];
#pragma unroll
    for (int n = 1; n < kBlocks; ++n) m[r] = half2_max(m[r], s[n][r]);
  }
  // both rows in one register for the two shuffles
  uint32_t rows = half2_max(__byte_perm(m[0], m[1], 0x5410), __byte_perm(m[0], m[1], 0x7632));
  rows = half2_max(rows, __shfl_xor_sync(~0u, rows, 1));
  rows = half2_max(rows, __shfl_xor_sync(~0u, rows, 2));
  // A row that sees no key has maximum -inf. Any finite one serves as anchor, as -inf scores become code 0 whatever it
  // is.
  const float f[2] = {fmaxf(half_low(rows), -kHalfMax), fmaxf(half_high(rows), -kHalfMax)};
  float limited[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) limited[r] = fminf(slope[r], kHalfMax);
  uint32_t a[2], b[2];
  anchor<kCode>(f, limited, slope, a, b, weight);
  // What is seldom needed, behind one branch.
  const bool beyond = fmaxf(fabsf(f[0] * limited[0]), fabsf(f[1] * limited[1])) > kCodeLimit;
  if (seldom(beyond) > 0) {
    // Logits beyond 5600 nats: a smaller slope keeps B finite. Neighbouring f16 scores are then 16 codes or more apart,
    // so the tile stays one-hot in e4m3 to within 2^-2, and tiles are still weighed by the true maximum.
    if (beyond) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (fabsf(f[r] * limited[r]) > kCodeLimit) limited[r] = __fdividef(kCodeLimit, fabsf(f[r]));
      anchor<kCode>(f, limited, slope, a, b, weight);
    }
    for (int turn = unpredicated(want_exact); turn > 0; --turn) {
      // The loop turns once, but the assembler cannot know: a sum, masked with this zero, ties one step to the next. In
      // one go it would convert all scores at once, and spill.
      const uint32_t zero = turn - 1;
      float exact[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint32_t x = s[n][r] ^ (__float_as_uint(exact[r]) & zero);
          exact[r] += exp2_approx(fmaf(half_low(x), slope[r] * 0.125f, -weight[r])) +
                      exp2_approx(fmaf(half_high(x), slope[r] * 0.125f, -weight[r]));
        }
      keep(exact[0], exact[1]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s[n][r] = code_of<kCode>(s[n][r], a[r], b[r]);
}

template <Code kCode, int kBlocks, class Keep>
__device__ __forceinline__ void softmax_by_code(uint32_t (&s)[kBlocks][2], const float (&slope)[2], float (&weight)[2],
                                                bool want_exact, const Keep& keep) {
  const auto seldom = [&](bool beyond) { return unpredicated(want_exact || __any_sync(~0u, beyond)); };
  softmax_by_code<kCode>(s, slope, weight, want_exact, seldom, keep);
}

template <int kBlocks>
__device__ __forceinline__ void pack_p(uint32_t (&p)[kBlocks / 4][4], const uint32_t (&s)[kBlocks][2]) {
#pragma unroll
  for (int step = 0; step < kBlocks / 4; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int r = 0; r < 2; ++r)  // the low byte of each half is the code
        p[step][2 * h + r] = __byte_perm(s[4 * step + 2 * h][r], s[4 * step + 2 * h + 1][r], 0x6420);
}

// P of some blocks, which begin at block kFirst; that of the others is 0.
template <int kFirst, int kSteps, int kBlocks>
__device__ __forceinline__ void pack_part(uint32_t (&p)[kSteps][4], const uint32_t (&s)[kBlocks][2]) {
  pack_p(reinterpret_cast<uint32_t (&)[kBlocks / 4][4]>(p[kFirst / 4]), s);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    if (step < kFirst / 4 || step >= (kFirst + kBlocks) / 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[step][i] = 0;
}

// ---- weighing tiles against each other ------------------------------------------------------------------------------

// beta[r] = 2^(weight - ref): what a tile counts against the log2 weight that O and the sums of a row are relative to.
// A row's first tile sets the reference; it moves only when a tile outweighs it by more than 2^16, so that O is
// rescaled rarely and P V, which is below 2^8 * 448 * keys * descale, keeps 2^95 to float32's end. `rescale(r, x)`
// multiplies everything that row r has summed up by x.
constexpr float kMaxRise = 16.f;

template <class Rescale>
__device__ __forceinline__ void weigh(float (&ref)[2], const float (&weight)[2], bool first, float (&beta)[2],
                                      const Rescale& rescale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first) ref[r] = weight[r];
    const float rise = weight[r] - ref[r];
    beta[r] = exp2_approx(rise);
    if (rise > kMaxRise) {
      rescale(r, exp2_approx(-rise));
      ref[r] = weight[r];
      beta[r] = 1.f;
    }
  }
}

}  // namespace fp8cutlass
