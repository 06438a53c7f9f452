// A CTA on the CPU: each CUDA thread is a fiber, and the threads of a warp meet where instructions need all of them.
// Between these places any fiber may run: a seed decides which. Copies to shared memory arrive as late as the program
// allows, or at once. So a missing barrier or wait is a wrong result here, always or for some seed.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace device {

struct Index {
  unsigned x;
};

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  int bytes, size;
};

// A fiber begins by its context, and goes on from where it left by a jump, which takes no call of the system.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool begun = false;
  Index thread;
  std::vector<std::vector<Copy>> groups;        // that are on their way, the oldest first
  std::vector<Copy> open;                       // not committed
  std::vector<std::function<void()>> products;  // that nobody has waited for
};

// Where `size` fibers meet. What they bring lies in `words` until they meet for the second time after.
struct Meeting {
  int size = 0, arrived = 0;
  unsigned round = 0;
  std::vector<Fiber*> waiting;
  std::array<std::array<uint64_t, 8>, 32> words[2];
};

struct Cta {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps, warpgroups;
  Meeting all, first;  // of all threads, of the first ones
  std::vector<Fiber*> ready;
  std::mt19937 random;
  jmp_buf scheduler;
  bool late = true;
  std::vector<std::pair<const uint8_t*, const uint8_t*>> readable;  // what copies and loads may read
  const char* failure = nullptr;
  unsigned block = 0;
};

inline std::vector<std::unique_ptr<char[]>> stacks;  // of threads, used again by the next CTA
inline Cta* cta = nullptr;
inline Fiber* self = nullptr;

inline void yield_to_scheduler() {
  if (_setjmp(self->place) == 0) _longjmp(cta->scheduler, 1);
}

// Returns when the fiber yields, or has ended.
inline void resume(Fiber* fiber) {
  self = fiber;
  if (_setjmp(cta->scheduler) != 0) return;
  if (fiber->begun) _longjmp(fiber->place, 1);
  fiber->begun = true;
  setcontext(&fiber->context);
}

// Ends the run: nobody goes on.
inline void stop(const char* what) {
  cta->failure = what;
  yield_to_scheduler();
}

inline void pause() {  // any other may run first
  cta->ready.push_back(self);
  yield_to_scheduler();
}

// A barrier of shared memory as it lies there: arrivals that a phase wants and lacks, and phases that are over.
struct Arrivals {
  int16_t wanted, lacking;
  uint32_t phases;
};

// Returns the round whose words all have brought.
inline unsigned meet(Meeting& m) {
  const unsigned round = m.round;
  if (++m.arrived == m.size) {
    m.arrived = 0, ++m.round;
    for (Fiber* f : m.waiting) cta->ready.push_back(f);
    m.waiting.clear();
    if (cta->random() % 4 == 0) pause();
  } else {
    m.waiting.push_back(self);
    yield_to_scheduler();
  }
  return round;
}

inline Meeting& own_warp() { return cta->warps[self->thread.x / 32]; }
inline Meeting& own_warpgroup() { return cta->warpgroups[self->thread.x / 128]; }
inline int lane() { return int(self->thread.x % 32); }

// What each lane brings, for all of them.
template <class T>
std::array<T, 32> gathered(const T& own) {
  static_assert(sizeof(T) <= 64);
  Meeting& m = own_warp();
  std::memcpy(&m.words[m.round % 2][lane()], &own, sizeof(T));
  const unsigned round = meet(m);
  std::array<T, 32> all;
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &m.words[round % 2][i], sizeof(T));
  return all;
}

inline bool may_read(const uint8_t* from, int size) {
  for (const auto& [begin, end] : cta->readable)
    if (from >= begin && from + size <= end) return true;
  return false;
}

inline void perform(const Copy& c) {
  if (c.bytes > 0 && !may_read(c.from, c.size)) stop("a copy reads outside of the tensors");
  if (reinterpret_cast<uintptr_t>(c.to) % c.size != 0 ||
      (c.bytes > 0 && reinterpret_cast<uintptr_t>(c.from) % c.size != 0))
    stop("a copy is not aligned");
  std::memset(c.to, 0, c.size);
  if (c.bytes > 0) std::memcpy(c.to, c.from, c.bytes);
}

inline void copy(uint8_t* to, const uint8_t* from, int bytes, int size) {
  const Copy c{to, from, bytes, size};
  if (cta->late) {
    self->open.push_back(c);
  } else {
    perform(c);
  }
}

// What this thread copied since the last call is a group.
inline void commit() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}

inline void wait_for(int pending) {
  while (int(self->groups.size()) > pending) {
    for (const Copy& c : self->groups.front()) perform(c);
    self->groups.erase(self->groups.begin());
  }
}

// Four matrices of 8 rows of 16 bytes, a row an address; a lane's four bytes of each.
inline void load_matrices(uint32_t (&r)[4], const uint8_t* row) {
  const auto rows = gathered(row);
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], rows[8 * i + lane() / 4] + 4 * (lane() % 4), 4);
}

inline void enter(unsigned high, unsigned low) {
  auto* const program = reinterpret_cast<std::function<void()>*>(uintptr_t(high) << 32 | low);
  (*program)();
  self->thread.x = ~0u;
  yield_to_scheduler();
}

// Runs one CTA to its end; what went wrong, or null.
inline const char* run(Cta& c, int threads, std::function<void()> program) {
  cta = &c;
  c.fibers.clear(), c.ready.clear();
  c.warps.assign(threads / 32, Meeting());
  for (Meeting& m : c.warps) m.size = 32;
  c.warpgroups.assign(threads / 128, Meeting());
  for (Meeting& m : c.warpgroups) m.size = 128;
  c.all = c.first = Meeting();
  c.all.size = threads;
  constexpr size_t kStack = 256 * 1024;
  const auto address = reinterpret_cast<uintptr_t>(&program);
  for (int i = 0; i < threads; ++i) {
    auto fiber = std::make_unique<Fiber>();
    if (stacks.size() <= size_t(i)) stacks.emplace_back(new char[kStack]);
    fiber->thread.x = unsigned(i);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks[i].get(), fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(enter), 2, unsigned(address >> 32), unsigned(address));
    c.ready.push_back(fiber.get());
    c.fibers.push_back(std::move(fiber));
  }
  while (!c.ready.empty() && c.failure == nullptr) {
    std::swap(c.ready[c.random() % c.ready.size()], c.ready.back());
    Fiber* const next = c.ready.back();
    c.ready.pop_back();
    resume(next);
  }
  for (const auto& fiber : c.fibers)
    if (fiber->thread.x != ~0u && c.failure == nullptr) c.failure = "a thread waits for ever";
  return c.failure;
}

}  // namespace device
