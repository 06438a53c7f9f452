// Proves on the host what the kernels take for granted. Prints one line a property; exits non-zero if any fails.
// Built by tests/native/test_layout.py with g++ and the CuTe headers.
#include "fp8cutlass/layout.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cute/swizzle.hpp>
#include <set>
#include <vector>

#include "fp8cutlass/schedule.h"
#include "fp8cutlass/sm90/operand.h"
#include "fp8cutlass/walk/order.h"

using namespace fp8cutlass;

static int failures = 0;
static void report(bool ok, const char* what, int a = 0, int b = 0) {
  std::printf("%s %s %d x %d\n", ok ? "ok" : "FAILED", what, a, b);
  failures += !ok;
}

// Eight 16-byte accesses of one ldmatrix phase must hit eight different 16-byte columns of the 128 bytes of banks.
static bool conflict_free(const std::vector<int>& offsets) {
  std::set<int> columns;
  for (int o : offsets) columns.insert(o / 16 % 8);
  return columns.size() == offsets.size();
}

// Where TMA puts a byte, by CuTe's word for its swizzle, and what wgmma's descriptors say of whole patterns. The two
// halves of 16 rows are read and written at a time: no two of 8 lanes may meet in a bank.
template <int kRows, int kRowBytes>
void check_operand() {
  using Tile = sm90::OperandTile<kRows, kRowBytes>;
  constexpr int kBits = Tile::kWidth == 128 ? 3 : 2;
  const cute::Swizzle<kBits, 4, 3> swizzle;
  bool placed = true, described = true, apart = true;
  for (int row = 0; row < kRows; ++row)
    for (int byte = 0; byte < kRowBytes; ++byte) {
      const int block = byte / Tile::kWidth, plain = row * Tile::kWidth + byte % Tile::kWidth;
      placed = placed && Tile::offset(row, byte) == block * Tile::kBlockBytes + int(swizzle(plain));
      if (row % 8 == 0 && byte % 32 == 0)
        described = described && 16 * int(Tile::advance(row, byte / 32)) == block * Tile::kBlockBytes + plain;
    }
  for (int row = 0; row < kRows; row += 8)
    for (int byte = 0; byte < kRowBytes; byte += 16) {
      std::vector<int> lanes;
      for (int lane = 0; lane < 8; ++lane) lanes.push_back(Tile::offset(row + lane, byte));
      apart = apart && conflict_free(lanes);
    }
  bool behind = true;  // halves of a row, as its groups are read and written one after the other
  constexpr int kGroups = kRowBytes / 32;
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < kGroups; ++i) {
        const int byte = 16 * kGroups * half;
        behind = behind && Tile::template behind<kGroups>(Tile::offset(row, byte), row, byte, i) ==
                               Tile::offset(row, byte + 16 * i);
      }
  report(behind, "groups behind another", kRows, kRowBytes);
  report(placed && described, "bytes where TMA puts them", kRows, kRowBytes);
  report(apart, "8 rows apart", kRows, kRowBytes);
}

template <int kRows, int kRowBytes>
void check_tile() {
  using Tile = SmemTile<kRows, kRowBytes>;
  std::set<int> seen;
  bool inside = true, reads = true, writes = true, advances = true, cute_says = true;
  const cute::Swizzle<Tile::kBits, 4, Tile::kShift> swizzle;
  for (int row = 0; row < kRows; ++row)
    for (int chunk = 0; chunk < Tile::kRowChunks; ++chunk) {
      const int o = Tile::offset(row, chunk);
      inside = inside && o >= 0 && o % 16 == 0 && o + 16 <= Tile::kBytes;
      cute_says = cute_says && o == int(swizzle(row * Tile::kPitch + chunk * 16));
      seen.insert(o);
    }
  report(inside && int(seen.size()) == kRows * Tile::kRowChunks, "bijective", kRows, kRowBytes);
  report(cute_says, "where CuTe's swizzle says", kRows, kRowBytes);
  for (int row = 0; row < kRows; row += 8)
    for (int chunk = 0; chunk < Tile::kRowChunks; ++chunk) {
      std::vector<int> phase;
      for (int r = 0; r < 8; ++r) phase.push_back(Tile::offset(row + r, chunk));
      reads = reads && conflict_free(phase);
    }
  report(reads, "ldmatrix conflict-free", kRows, kRowBytes);
  // cp.async: eight neighbouring threads write chunks of one or more rows
  constexpr int kColumns = Tile::kRowChunks % 3 == 0 ? Tile::kRowChunks / 3 * 4 : Tile::kRowChunks;
  for (int thread = 0; thread < 128; thread += 8) {
    std::vector<int> phase;
    for (int t = thread; t < thread + 8; ++t)
      if (t % kColumns < Tile::kRowChunks && t / kColumns < kRows)
        phase.push_back(Tile::offset(t / kColumns, t % kColumns));
    writes = writes && conflict_free(phase);
  }
  report(writes, "cp.async conflict-free", kRows, kRowBytes);
  for (int row = 0; row < 16; ++row)
    for (int chunk = 0; chunk < 2; ++chunk)
      for (int rows = 0; row + rows < kRows; rows += 8)
        for (int step = 0; step < kRowBytes / 32; ++step)
          advances = advances &&
                     Tile::advance(Tile::offset(row, chunk), rows, step) == Tile::offset(row + rows, chunk + 2 * step);
  report(advances, "advance equals offset", kRows, kRowBytes);
}

// Lane t of a quad holds S columns 2t, 2t + 1 of every n8 block; pack_p puts blocks 4s + 2h and 4s + 2h + 1 of step s
// into A register 2h (rows group) as bytes x0 x1 y0 y1. The A operand reads byte i of that register as
// k = 16 * h + 4t + i of the step. V's packed order must therefore hold that key at that position.
static void check_key_order() {
  bool ok = true;
  for (int step = 0; step < 4; ++step)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int byte = 0; byte < 4; ++byte) {
          const int block = 4 * step + 2 * h + byte / 2;
          const int key = 8 * block + 2 * t + byte % 2;
          const int position = 32 * step + 16 * h + 4 * t + byte;
          ok = ok && packed_key(key) == position;
        }
  report(ok, "packed keys are the A operand's order, all lanes", 128);
}

// Quotients by product and shift, of numbers around each multiple of a divisor that is tried, and of the largest.
static void check_divisors() {
  bool ok = true;
  std::vector<int> divisors;
  for (int i = 1; i <= 3000; ++i) divisors.push_back(i);
  for (int bit = 12; bit < 31; ++bit)
    for (int near = -1; near <= 1; ++near) divisors.push_back((1 << bit) + near);
  divisors.push_back(INT32_MAX - 1);
  divisors.push_back(INT32_MAX);
  for (const int d : divisors) {
    const Divisor by(d);
    const int64_t most = INT32_MAX / d;
    std::set<int64_t> numbers = {0, 1, INT32_MAX - 1, INT32_MAX};
    for (int64_t multiple = 1; multiple <= most; multiple += 1 + multiple / 2)
      for (const int64_t m : {multiple, most - multiple + 1})
        for (int near = -1; near <= 1; ++near)
          if (const int64_t n = m * d + near; n <= INT32_MAX) numbers.insert(n);
    for (const int64_t number : numbers) {
      const int n = int(number);
      int quotient, rest;
      by(quotient, rest, n);
      ok = ok && quotient == n / d && rest == n % d && by.div(n) == n / d;
    }
  }
  report(ok && Divisor().div(INT32_MAX) == INT32_MAX, "divisors divide", int(divisors.size()));
}

// Output block n, lane t, element e of the accumulator is V^T row 8n + 2t + e; it must be column
// 32 * (n / 4) + 8t + 2 * (n % 4) + e.
static void check_column_order() {
  bool ok = true;
  for (int n = 0; n < 32; ++n)
    for (int t = 0; t < 4; ++t)
      for (int e = 0; e < 2; ++e) ok = ok && packed_column(32 * (n / 4) + 8 * t + 2 * (n % 4) + e) == 8 * n + 2 * t + e;
  report(ok, "packed columns give a lane eight neighbours", 256);
}

// The way of V through shared memory: what lanes write is what others read, each byte has a place of its own, and no
// access of half a warp (8 bytes a lane) or of a warp (4 bytes a lane) meets a bank twice.
template <int kRows, int kHeadDim, int kLanes>
void check_stage() {
  using Stage = TransposeStage<kRows, kHeadDim, kLanes>;
  std::set<int> seen;
  bool inside = true, writes = true, reads = true;
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kHeadDim; ++column) {
      const int o = Stage::offset(row / 16 * 16, row % 16, column);
      inside = inside && o >= 0 && o < Stage::kBytes && Stage::offset(row, row % 16, column) == o;
      inside = inside && (column % 8 == 0 || o == Stage::offset(row, row % 16, column - 1) + 1);
      seen.insert(o);
    }
  report(inside && int(seen.size()) == kRows * kHeadDim, "stage bijective", kRows, kHeadDim);
  constexpr int kChunks = kHeadDim / 8 / kLanes, kRowStep = 256 / kLanes;
  for (int thread = 0; thread < 256; thread += 16)
    for (int pass = 0; pass < kRows / kRowStep; ++pass)
      for (int i = 0; i < kChunks; ++i) {
        std::set<int> banks;
        for (int t = thread; t < thread + 16; ++t) {
          const int row = t / kLanes + pass * kRowStep;
          const int o = Stage::offset(row, row % 16, 8 * (t % kLanes + kLanes * i));
          writes = writes && o % 8 == 0;
          banks.insert(o / 8 % 16);
        }
        writes = writes && banks.size() == 16;
      }
  report(writes, "stage writes conflict-free", kRows, kHeadDim);
  for (int part = 0; part < kRows / 64; ++part)
    for (int columns = 0; columns < kHeadDim; columns += 32)
      for (int k = 0; k < 16; ++k) {
        std::set<int> banks;
        for (int lane = 0; lane < 32; ++lane) {
          const int o = Stage::offset(64 * part + 16 * (lane % 4), k, columns + 4 * (lane / 4));
          reads = reads && o % 4 == 0;
          banks.insert(o / 4 % 32);
        }
        reads = reads && banks.size() == 32;
      }
  report(reads, "stage reads conflict-free", kRows, kHeadDim);
}

// The way of FP8 V: lanes write 16 bytes, a quarter of a warp at a time. It is read as the other is.
template <int kRows, int kHeadDim, int kLanes>
void check_bytes_stage() {
  using Stage = TransposeStage<kRows, kHeadDim, kLanes>;
  constexpr int kChunks = kHeadDim / 16 / kLanes, kRowStep = 256 / kLanes;
  static_assert(kRows % kRowStep == 0);
  bool writes = true, whole = true;
  std::set<int> written;
  for (int thread = 0; thread < 256; thread += 8)
    for (int pass = 0; pass < kRows / kRowStep; ++pass)
      for (int i = 0; i < kChunks; ++i) {
        std::vector<int> offsets;
        for (int t = thread; t < thread + 8; ++t) {
          const int row = t / kLanes + pass * kRowStep, column = 16 * (t % kLanes + kLanes * i);
          const int o = Stage::offset(row, row % 16, column);
          for (int byte = 1; byte < 16; ++byte)
            whole = whole && Stage::offset(row, row % 16, column + byte) == o + byte;
          writes = writes && o % 16 == 0 && o + 16 <= Stage::kBytes;
          offsets.push_back(o);
          written.insert(o);
        }
        writes = writes && conflict_free(offsets);
      }
  report(writes && whole && int(written.size()) == kRows * kHeadDim / 16, "stage takes 16 bytes conflict-free", kRows,
         kHeadDim);
}

template <int kTileM, int kTileN, Mask kMask>
void check_schedule(int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k, int offset) {
  constexpr bool kCausal = kMask == Mask::causal;
  ForwardParams p{};
  p.batch = batch, p.heads = heads, p.kv_heads = kv_heads, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.causal_offset = offset, p.window_offset = offset - 75;
  std::set<std::vector<int>> seen;
  bool ok = true;
  int before = INT32_MAX;
  const int items = int(work_items(p, kTileM));
  for (int item = 0; item < items; ++item) {
    const WorkItem w = work_item<kTileM, kTileN, kMask>(p, item);
    seen.insert({w.batch, w.head, w.row});
    ok = ok && w.batch < batch && w.head < heads && w.row % kTileM == 0 && w.row < seqlen_q;
    ok = ok && w.kv_head == int64_t(w.batch) * kv_heads + w.head / (heads / kv_heads);
    // the tiles cover every key that some row of the item sees, and no tile is beyond all of them
    if (kMask == Mask::window) {
      int64_t begin = INT32_MAX, end = 0;
      for (int row = w.row; row < w.row + kTileM && row < seqlen_q; ++row) {
        const int64_t first = std::max<int64_t>(0, int64_t(row) + p.window_offset);
        const int64_t last = std::min<int64_t>(seqlen_k, int64_t(row) + offset + 1);
        if (first < last) begin = std::min(begin, first), end = std::max(end, last);
      }
      ok = ok && w.first_tile >= 0 && w.first_tile < w.tiles && (w.tiles - 1) * kTileN < seqlen_k;
      if (end > 0) ok = ok && w.first_tile == begin / kTileN && w.tiles == (end + kTileN - 1) / kTileN;
      continue;
    }
    int keys = 0;
    for (int row = w.row; row < w.row + kTileM && row < seqlen_q; ++row) {
      const int64_t last = kCausal ? std::min<int64_t>(seqlen_k, int64_t(row) + offset + 1) : seqlen_k;
      keys = std::max<int64_t>(keys, last);
    }
    ok = ok && w.tiles == (keys + kTileN - 1) / kTileN;
    if (kCausal) ok = ok && w.tiles <= before;  // longest first
    before = w.tiles;
  }
  report(ok && int(seen.size()) == items && items == batch * heads * ((seqlen_q + kTileM - 1) / kTileM),
         kCausal ? "causal schedule visits each tile once" : "schedule visits each tile once", seqlen_q, seqlen_k);
}

// The same of sm90's items, on a card like an H200. Where there is one phase (without a mask, and of short sequences of
// heads that are not wide), sections come one after the other; the first item is one of the longest, the last one of
// the first rows. Short sections have an item for each SM and more, where there are so many.
template <int kTileM, int kTileN, int kHeadDim, Mask kMask>
void check_items(int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k) {
  constexpr bool kCausal = kMask == Mask::causal;
  ForwardParams p{};
  p.batch = batch, p.heads = heads, p.kv_heads = kv_heads, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.causal_offset = seqlen_k - seqlen_q, p.sm_count = 132;
  p.o_stride_batch = 1'000'000'007, p.o_stride_head = 10'007, p.o_stride_row = 101;
  const Order order = work_order(p, kTileM, kHeadDim, kMask);
  const int row_tiles = (seqlen_q + kTileM - 1) / kTileM;
  std::set<std::vector<int>> seen;
  bool ok = order.items == batch * heads * row_tiles && order.phases <= Order::kMaxPhases;
  int longest = 0, first_tiles = 0, last_row = 0, section = 0;
  for (int n = 0; n < order.items; ++n) {
    const Item item = item_at<kTileM, kTileN, kMask>(p, order, n);
    const int head = item.batch * heads + item.head;
    ok = ok && item.batch < batch && item.head < heads && item.row % kTileM == 0 && item.row < seqlen_q;
    ok = ok && item.kv_head == item.batch * kv_heads + item.head / (heads / kv_heads) && item.first_tile == 0;
    const int end = std::min(item.row + kTileM, seqlen_q);
    const int keys = kCausal ? std::min(end + p.causal_offset, seqlen_k) : seqlen_k;
    ok = ok && item.tiles == std::max(1, (keys + kTileN - 1) / kTileN);
    if (n == 0) first_tiles = item.tiles;
    longest = std::max(longest, item.tiles);
    last_row = item.row;
    seen.insert({head, item.row});
    ok = ok && item.out == item.batch * p.o_stride_batch + item.head * p.o_stride_head + item.row * p.o_stride_row;
    ok = ok && (order.phases > 1 || head / order.section >= section);  // none is gone back to
    section = head / order.section;
  }
  ok = ok && int(seen.size()) == order.items && first_tiles == longest && last_row == 0;
  ok = ok && (order.phases == 1) == (!kCausal || row_tiles < 4 || (row_tiles <= 8 && kHeadDim <= 128));
  if (kCausal && seqlen_k < 2048 && kHeadDim <= 128)
    ok = ok && order.section * row_tiles >= std::min(p.sm_count, order.items);
  report(ok, kCausal ? "causal items visit each tile once" : "items visit each tile once", seqlen_q, seqlen_k);
}

template <Mask kMask>
void check_items_of() {
  for (int sq : {1, 64, 65, 300, 4224, 5000, 6100})
    for (int sk : {1, 129, 512, 6100}) {
      check_items<64, 256, 64, kMask>(2, 6, 3, sq, sk);
      check_items<128, 128, 128, kMask>(3, 5, 5, sq, sk);
      check_items<192, 192, 64, kMask>(1, 7, 1, sq, sk);
      check_items<128, 256, 256, kMask>(1, 1, 1, sq, sk);
    }
  check_items<128, 128, 128, kMask>(97, 7, 7, 512, 512);  // sections of several heads, the last one narrower
  check_items<128, 128, 256, kMask>(5, 8, 2, 2048, 2048);
  check_items<128, 128, 256, kMask>(16, 8, 8, 1024, 1024);  // wide: two phases
  check_items<128, 128, 128, kMask>(1, 67, 67, 512, 512);   // no two sections of an item for each SM
  check_items<128, 128, 128, kMask>(1, 99, 99, 512, 512);
}

int main() {
  check_tile<64, 32>(), check_tile<128, 32>(), check_tile<64, 64>(), check_tile<128, 64>(), check_tile<32, 64>();
  check_tile<64, 96>(), check_tile<128, 96>(), check_tile<32, 96>(), check_tile<64, 128>(), check_tile<128, 128>();
  check_tile<64, 256>(), check_tile<128, 256>(), check_tile<32, 256>(), check_tile<96, 64>(), check_tile<256, 64>();
  check_tile<96, 128>(), check_tile<256, 32>(), check_tile<256, 128>(), check_tile<32, 128>(), check_tile<32, 32>(),
      check_tile<96, 32>();
  check_operand<64, 64>(), check_operand<192, 64>(), check_operand<64, 96>(), check_operand<128, 128>();  // Q in e4m3
  check_operand<192, 128>(), check_operand<64, 192>(), check_operand<128, 192>(),
      check_operand<128, 256>();  // and before
  check_key_order();
  check_divisors();
  check_column_order();
  check_stage<128, 32, 2>(), check_stage<128, 64, 4>(), check_stage<256, 64, 4>(), check_stage<128, 96, 4>();
  check_stage<192, 96, 4>(), check_stage<256, 96, 4>(), check_stage<128, 128, 8>(), check_stage<192, 128, 8>();
  check_bytes_stage<128, 32, 2>(), check_bytes_stage<128, 64, 4>(), check_bytes_stage<128, 96, 2>();
  check_bytes_stage<128, 128, 8>(), check_bytes_stage<128, 192, 4>(), check_bytes_stage<128, 256, 16>();
  check_stage<256, 128, 8>(), check_stage<128, 192, 8>(), check_stage<256, 192, 8>(), check_stage<128, 256, 16>();
  for (int sq : {1, 63, 64, 65, 300})
    for (int sk : {1, 64, 129, 512})
      for (int offset : {0, sk - sq, -5, 1000}) {
        check_schedule<64, 64, Mask::full>(2, 6, 3, sq, sk, offset);
        check_schedule<64, 64, Mask::causal>(2, 6, 3, sq, sk, offset);
        check_schedule<128, 32, Mask::causal>(1, 4, 4, sq, sk, offset);
        check_schedule<64, 32, Mask::window>(2, 6, 3, sq, sk, offset);
      }
  check_items_of<Mask::full>(), check_items_of<Mask::causal>();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
