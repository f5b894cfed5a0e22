// The machine that a kernel of this folder runs on where there is no GPU.
//
// A thread of a block is a fiber with a stack of its own. Blocks run one after another, and inside
// a block the waves take turns: each lane runs until it returns, reaches a barrier or reaches an
// operation of its wavefront, and goes on when the others that have to be there are there. So a
// launch gives the same result every time. What cannot go on is an error that names block and
// thread; the launch ends with it and the process lives.
//
// cpu.h gives it the names that a kernel uses.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Two libraries in one process have a machine each: none of this may be merged between them.
#pragma GCC visibility push(hidden)

#if !defined(WAVE_LANES)
#define WAVE_LANES 64  // 32 shows what a kernel written for warps assumes
#endif

constexpr int WAVE = WAVE_LANES;
using LaneMask = unsigned long long;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cpu {

constexpr std::size_t STACK = 1 << 18;    // bytes of a fiber; only what it touches is real memory
constexpr std::size_t LDS_BYTES = 65536;  // what a block of CDNA2 and CDNA3 may use
constexpr std::size_t MOST_THREADS = 1024;
constexpr std::size_t DEPOSIT = 256;      // bytes that a lane may hand to its wavefront at once

// Filled for the host; labcore.hip.emulate has the same fields in the same order.
struct Report {
  std::int64_t counting;  // asked by the host: whether to count
  std::int64_t lds_accesses, lds_conflicts, transactions, bytes, barriers, mfma;
  std::int64_t merged_lds, merged_transactions, merged_lines;
  char message[512];
};

struct Failure {};  // thrown through a fiber's frames; the message is in the report

// What an access is inside of; only cpu_check.h looks.
struct Array {
  const unsigned char* base = nullptr;
  const char* name = "";
  bool lds = false;
};

enum class State { RUNS, AT_BARRIER, IN_WAVE, DONE };

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  bool entered = false;
  std::unique_ptr<char[]> stack{new char[STACK]};
  State state = State::DONE;
  dim3 place;
  int number = 0;          // in the block, x fastest
  int line = 0;            // where it waits
  const char* what = "";   // and for which operation
  const void* mine = nullptr;
  std::size_t bytes = 0;
};

struct Machine {
  dim3 grid, block, at;  // at: the block that runs
  std::vector<std::unique_ptr<Fiber>> fibers;
  int threads = 0;
  Fiber* self = nullptr;  // null while the scheduler runs
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  bool failed = false;
  Report* report = nullptr;
  std::int64_t launch = 0;
  std::int64_t span = 0;  // from one barrier to the next, counted over all launches
  alignas(64) unsigned char lds[LDS_BYTES];
  std::size_t lds_used = 0;
  std::size_t dynamic_bytes = 0;  // at the end of lds, asked for by the launch
  LaneMask active = 0;  // lanes of the wavefront operation that was done last
  alignas(16) unsigned char met[WAVE * DEPOSIT];
};

inline Machine machine;

inline int lane() { return machine.self->number % WAVE; }

[[noreturn]] inline void fail_with(const Fiber& thread, const char* format, va_list values) {
  Report& report = *machine.report;
  const dim3 &b = machine.at, &t = thread.place;
  int used = std::snprintf(report.message, sizeof report.message,
                           "block (%u, %u, %u), thread (%u, %u, %u): ", b.x, b.y, b.z, t.x, t.y,
                           t.z);
  std::vsnprintf(report.message + used, sizeof report.message - used, format, values);
  machine.failed = true;
  throw Failure{};
}

// Ends the launch with a sentence about `thread`.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail_at(const Fiber& thread,
                                                                       const char* format, ...) {
  va_list values;
  va_start(values, format);
  fail_with(thread, format, values);
}

// Ends the launch before a thread runs.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void refuse(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(machine.report->message, sizeof machine.report->message, format, values);
  va_end(values);
  throw Failure{};
}

// Ends the launch with a sentence about the thread that runs.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  fail_with(*machine.self, format, values);
}

// ---- fibers ----

// setjmp may return twice, so what calls it must not be merged into a kernel.
__attribute__((noinline)) inline void pause() {
  if (!_setjmp(machine.self->here)) _longjmp(machine.scheduler, 1);
}

inline void enter() {
  for (;;) {  // one turn a block
    try {
      machine.body(machine.arguments);
    } catch (const Failure&) {
    }
    machine.self->state = State::DONE;
    pause();
  }
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
  machine.self = &fiber;
  if (!_setjmp(machine.scheduler)) {
    if (fiber.entered) _longjmp(fiber.here, 1);
    fiber.entered = true;
    setcontext(&fiber.start);
  }
  machine.self = nullptr;
  if (machine.failed) throw Failure{};
}

// ---- what threads wait for ----

inline void wait(State state, const char* what, int line) {
  Fiber& self = *machine.self;
  self.state = state;
  self.what = what;
  self.line = line;
  pause();
}

// All lanes of the wave that come to the same place hand over `bytes` bytes; each gets everyone's,
// [WAVE][bytes], valid until it waits again. Lanes that have returned or wait elsewhere are not
// `active`.
inline const unsigned char* meet(const void* mine, std::size_t bytes, const char* what, int line) {
  if (bytes > DEPOSIT) fail("%s hands over %zu bytes, at most %zu fit", what, bytes, DEPOSIT);
  machine.self->mine = mine;
  machine.self->bytes = bytes;
  wait(State::IN_WAVE, what, line);
  return machine.met;
}

inline bool active(int lane) { return machine.active >> lane & 1; }

// Whether anything is counted is decided where accesses are seen: cpu.h or cpu_check.h.
void instructions_end(int wave);  // all lanes of the wave have met
void forget_accesses();

// ---- one block ----

// Lets the lanes of one wave run until each has returned or waits at a barrier.
inline void run_wave(int first, int count) {
  Machine& m = machine;
  for (;;) {
    Fiber* next = nullptr;  // lanes that diverged meet again further down, so the upper line first
    for (int i = first; i < first + count; ++i) {
      Fiber& fiber = *m.fibers[i];
      if (fiber.state == State::RUNS) resume(fiber);
      if (fiber.state == State::IN_WAVE && (!next || fiber.line < next->line)) next = &fiber;
    }
    if (!next) return;
    m.active = 0;
    int here = 0;
    const int line = next->line;
    const char* what = next->what;
    for (int i = 0; i < count; ++i) {
      Fiber& fiber = *m.fibers[first + i];
      if (fiber.state != State::IN_WAVE || fiber.line != line || fiber.what != what) continue;
      std::memcpy(m.met + i * fiber.bytes, fiber.mine, fiber.bytes);
      m.active |= LaneMask(1) << i;
      fiber.state = State::RUNS;
      ++here;
    }
    if (here == count) instructions_end(first / WAVE);
  }
}

// Every thread waits at one barrier, or every thread has returned; all else is an error.
inline bool pass_barrier() {
  Machine& m = machine;
  Fiber *waits = nullptr, *returned = nullptr, *elsewhere = nullptr;
  for (int i = 0; i < m.threads; ++i) {
    Fiber& fiber = *m.fibers[i];
    if (fiber.state == State::DONE) {
      if (!returned) returned = &fiber;
    } else if (!waits) {
      waits = &fiber;
    } else if (fiber.line != waits->line && !elsewhere) {
      elsewhere = &fiber;
    }
  }
  if (!waits) return false;
  if (returned)
    fail_at(*returned, "returned, and thread (%u, %u, %u) waits at the barrier of line %d",
            waits->place.x, waits->place.y, waits->place.z, waits->line);
  if (elsewhere)
    fail_at(*elsewhere, "waits at the barrier of line %d, thread (%u, %u, %u) at that of line %d",
            elsewhere->line, waits->place.x, waits->place.y, waits->place.z, waits->line);
  for (int i = 0; i < m.threads; ++i) m.fibers[i]->state = State::RUNS;
  ++m.report->barriers;
  return true;
}

inline void run_block() {
  Machine& m = machine;
  std::memset(m.lds, 0xff, sizeof m.lds);  // a NaN in every type: reading before writing shows
  for (int i = 0; i < m.threads; ++i) m.fibers[i]->state = State::RUNS;
  do {
    ++m.span;
    for (int first = 0; first < m.threads; first += WAVE) {
      run_wave(first, first + WAVE < m.threads ? WAVE : m.threads - first);
      instructions_end(first / WAVE);
    }
  } while (pass_barrier());
}

// ---- a launch ----

inline void prepare_fibers() {
  Machine& m = machine;
  m.threads = m.block.x * m.block.y * m.block.z;
  while (int(m.fibers.size()) < m.threads) m.fibers.emplace_back(new Fiber);
  for (int i = 0; i < m.threads; ++i) {
    Fiber& fiber = *m.fibers[i];
    fiber.number = i;
    fiber.place = dim3(i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y));
    fiber.entered = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
  }
}

inline void run_grid(void (*body)(void*), void* arguments, const unsigned* grid,
                     const unsigned* block) {
  Machine& m = machine;
  m.grid = dim3(grid[0], grid[1], grid[2]);
  m.block = dim3(block[0], block[1], block[2]);
  const std::size_t threads = std::size_t(block[0]) * block[1] * block[2];
  if (threads < 1 || threads > MOST_THREADS)
    refuse("a block has 1 to %zu threads, got %zu", MOST_THREADS, threads);
  if (!grid[0] || !grid[1] || !grid[2])
    refuse("a grid has at least one block, got %u x %u x %u", grid[0], grid[1], grid[2]);
  if (m.dynamic_bytes > LDS_BYTES)
    refuse("the launch asks for %zu bytes of LDS, and a block may use %zu", m.dynamic_bytes,
           LDS_BYTES);
  m.body = body;
  m.arguments = arguments;
  m.failed = false;
  m.lds_used = 0;
  ++m.launch;
  forget_accesses();
  prepare_fibers();
  for (unsigned z = 0; z < m.grid.z; ++z)
    for (unsigned y = 0; y < m.grid.y; ++y)
      for (unsigned x = 0; x < m.grid.x; ++x) {
        m.at = dim3(x, y, z);
        run_block();
      }
}

}  // namespace cpu

#pragma GCC visibility pop
