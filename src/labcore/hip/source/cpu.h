// A kernel's names on a CPU, over the machine of cpu_machine.h.
//
// Without CHECKED a Global is a plain pointer and the kernel runs as fast as its C++. With it
// cpu_check.h bounds every access, and counts if the launch asks for it.
#pragma once

#include "cpu_machine.h"

#pragma GCC visibility push(hidden)

#define __global__ static
#define __device__
#define __host__
#define __launch_bounds__(...)
#define WAVES_PER_EU(waves)
#define UNROLL

#if defined(__aarch64__) && !defined(__clang__)
using Half = __fp16;  // g++ 12 has no _Float16 there; the same 16 bits
#else
using Half = _Float16;
#endif

// ---- vectors ----

#include "bfloat.h"

template <typename T, int N>
struct alignas(N * sizeof(T)) Vec {
  T lanes[N];
  T& operator[](int i) { return lanes[i]; }
  const T& operator[](int i) const { return lanes[i]; }
};

#if defined(CHECKED)
#include "cpu_check.h"
#else

namespace cpu {
inline void instructions_end(int) {}
inline void forget_accesses() {}
}  // namespace cpu

template <typename T>
using Global = T* __restrict__;
template <typename T>
using Shared = T*;

template <typename T>
T* part(T* whole, long start, long) { return whole + start; }

template <int N, typename T>
Vec<T, N> load(const T* from, long i) {
  Vec<T, N> values;
  std::memcpy(&values, from + i, sizeof values);
  return values;
}
template <int N, typename T>
void store(T* to, long i, const Vec<T, N>& values) {
  std::memcpy(to + i, &values, sizeof values);
}

namespace cpu {
template <typename T>
T* lds_view(unsigned char* bytes, long, const Array&) { return reinterpret_cast<T*>(bytes); }

template <typename P>
struct Argument {
  explicit Argument(void* value) : value(*static_cast<P*>(value)) {}
  P value;
};
}  // namespace cpu

#endif

// ---- LDS and launches ----

namespace cpu {

// The static record of a SHARED: where this launch has put it.
struct Placed {
  std::int64_t launch = 0;
  std::size_t offset = 0;
  Array array;
};

template <typename T>
auto shared(Placed& placed, long count, const char* name) {
  Machine& m = machine;
  if (placed.launch != m.launch) {
    std::size_t end = m.lds_used + (count * sizeof(T) + 15) / 16 * 16;
    if (end + m.dynamic_bytes > LDS_BYTES)
      fail("%s needs the block's LDS up to byte %zu, and a block may use %zu", name,
           end + m.dynamic_bytes, LDS_BYTES);
    placed = {m.launch, m.lds_used, {m.lds, name, true}};
    m.lds_used = end;
  }
  return lds_view<T>(m.lds + placed.offset, count, placed.array);
}

template <typename... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<Argument<P>...> arguments;
  static void body(void* self) {
    Call& call = *static_cast<Call*>(self);
    std::apply([&](auto&... each) { call.kernel(each.value...); }, call.arguments);
  }
};

// A letter for each argument, by which the host gives it: a float, an int or something else, in
// capitals a tensor of them; H is of Half, B of BFloat.
template <typename T>
constexpr char letter(bool memory) {
  using Value = std::remove_const_t<T>;
  if (std::is_same_v<Value, float>) return memory ? 'F' : 'f';
  if (std::is_same_v<Value, int> || std::is_same_v<Value, unsigned>) return memory ? 'I' : 'i';
  if (std::is_same_v<Value, Half>) return memory ? 'H' : '?';
  if (std::is_same_v<Value, BFloat>) return memory ? 'B' : '?';
  return memory ? 'P' : '?';
}
template <typename P>
struct Kind { static constexpr char value = letter<P>(false); };
template <typename T>
struct Kind<T*> { static constexpr char value = letter<T>(true); };
#if defined(CHECKED)
template <typename T>
struct Kind<View<T>> { static constexpr char value = letter<T>(true); };
#endif
template <typename... P>
const char* takes(void (*)(P...)) {
  static constexpr char letters[] = {Kind<P>::value..., 0};
  return letters;
}

// Returns 0, or 1 with a sentence in the report. One at a time: the host holds a lock.
template <typename... P, std::size_t... I>
int launch(void (*kernel)(P...), std::index_sequence<I...>, const unsigned* grid,
           const unsigned* block, void** arguments, void* report) {
  machine.report = static_cast<Report*>(report);
  try {
    Call<P...> call{kernel, std::tuple<Argument<P>...>(arguments[I]...)};
    run_grid(Call<P...>::body, &call, grid, block);
  } catch (const Failure&) {
    return 1;
  }
  return 0;
}

template <typename... P>
int launch(void (*kernel)(P...), const unsigned* grid, const unsigned* block, void** arguments,
           void* report) {
  return launch(kernel, std::index_sequence_for<P...>{}, grid, block, arguments, report);
}

}  // namespace cpu

// ---- the kernel's names ----

#define threadIdx (::cpu::machine.self->place)
#define blockIdx (::cpu::machine.at)
#define blockDim (::cpu::machine.block)
#define gridDim (::cpu::machine.grid)

#define SHARED(T, name, count)          \
  static ::cpu::Placed name##_placed;   \
  auto name = ::cpu::shared<T>(name##_placed, count, #name)

#define ENTRY(name, ...)                                                                 \
  EXPORT int name(const unsigned* grid, const unsigned* block, void** arguments,         \
                  void* report) {                                                        \
    return ::cpu::launch(&__VA_ARGS__, grid, block, arguments, report);                  \
  }                                                                                      \
  EXPORT const char* name##_takes() { return ::cpu::takes(&__VA_ARGS__); }

inline int lane_id() { return cpu::lane(); }

inline void __syncthreads(int line = __builtin_LINE()) {
  cpu::wait(cpu::State::AT_BARRIER, "__syncthreads", line);
}

inline void wave_barrier(int line = __builtin_LINE()) {
  const char nothing = 0;
  cpu::meet(&nothing, 1, "wave_barrier", line);
}

inline void keep_order() {}

namespace cpu {
template <typename T>
T from_lane(T value, int lane, const char* what, int line) {
  static_assert(sizeof(T) == 4, "a lane hands over one register");
  const unsigned char* all = meet(&value, sizeof value, what, line);
  if (lane < 0 || lane >= WAVE || !active(lane))
    fail("%s of line %d reads lane %d, which takes no part", what, line, lane);
  std::memcpy(&value, all + lane * sizeof value, sizeof value);
  return value;
}
}  // namespace cpu

// Within groups of `width` lanes, a power of two. Past a group's end a lane reads itself.
template <typename T>
T __shfl(T value, int lane, int width = WAVE, int line = __builtin_LINE()) {
  const int from = (lane_id() & -width) | (lane & (width - 1));
  return cpu::from_lane(value, from, "__shfl", line);
}
template <typename T>
T __shfl_xor(T value, int mask, int width = WAVE, int line = __builtin_LINE()) {
  const int from = lane_id() ^ mask, end = (lane_id() & -width) + width;
  return cpu::from_lane(value, from < end ? from : lane_id(), "__shfl_xor", line);
}
template <typename T>
T __shfl_down(T value, unsigned delta, int width = WAVE, int line = __builtin_LINE()) {
  const int from = lane_id() + delta, end = (lane_id() & -width) + width;
  return cpu::from_lane(value, from < end ? from : lane_id(), "__shfl_down", line);
}
inline LaneMask __ballot(int predicate, int line = __builtin_LINE()) {
  const unsigned char mine = predicate != 0;
  const unsigned char* all = cpu::meet(&mine, 1, "__ballot", line);
  LaneMask mask = 0;
  for (int i = 0; i < WAVE; ++i) mask |= LaneMask(cpu::active(i) && all[i]) << i;
  return mask;
}

using std::exp2f;
using std::fmaxf;
using std::log2f;

#if __has_include("cpu_mfma.h")
#include "cpu_mfma.h"
#endif

#pragma GCC visibility pop
