// Bounds, races and counters of cpu.h: every access of a Global or a SHARED comes through a View.
//
// Counting follows the hardware's unit, the instruction of a wavefront. Its lanes run one after
// another here, so accesses are kept until the wave meets (a barrier, or an operation that all its
// lanes take part in) and are then put together: the n-th access of each lane on one line, to one
// array, in one direction, is one instruction. Where lanes diverge between two such meetings and
// come to a line in different turns of a loop, this pairs turns that the hardware would not.
// A compiler makes one wide instruction of narrow accesses to neighbors: `merged_…` count those.
#pragma once

namespace cpu {

struct Index {
  template <typename I>
  Index(I at, int line = __builtin_LINE()) : at(static_cast<long>(at)), line(line) {}
  long at;
  int line;
};

// ---- counters ----

struct Site {
  int line;
  const Array* array;
  bool writes;
  std::size_t bytes;
  bool operator<(const Site& other) const {
    return std::tie(line, array, writes, bytes) <
           std::tie(other.line, other.array, other.writes, other.bytes);
  }
};

// Each lane's accesses of one site, in order: bytes from the array's base.
using Visits = std::array<std::vector<std::size_t>, WAVE>;

inline std::array<std::map<Site, Visits>, MOST_THREADS / WAVE> sites;  // of each wave

inline void count_access(const Array& array, const void* address, std::size_t bytes, bool writes,
                         int line) {
  const std::size_t offset = static_cast<const unsigned char*>(address) - array.base;
  const int number = machine.self->number;
  sites[number / WAVE][Site{line, &array, writes, bytes}][number % WAVE].push_back(offset);
}

constexpr int BANKS = 32;           // of 4 bytes: LDS of CDNA2 and CDNA3
constexpr std::size_t SEGMENT = 64;  // bytes of a global transaction
constexpr std::size_t LINE = 128;    // bytes of a line of CDNA3's L1 cache

// The turn in which a lane's access is served; the lanes of one turn can be in each other's way.
// 128 bytes a cycle are 32 lanes of 4 bytes, 16 of 8 or 8 of 16. These are neighbours, but for
// 16-byte reads: lanes 0-3 go with 20-23, 4-7 with 16-19, 8-11 with 28-31, 12-15 with 24-27, and
// so on from lane 32. Sources: for 16 bytes AMD's Composable Kernel documentation ("Understanding
// AMD GPU LDS and Bank Conflicts"), for all widths "AMDGPU Kernel Optimization Guide" (2025) in
// nod-ai/amd-shark-ai. A bank cycle isn't a wavefront's: a port hands over 64 bytes a cycle.
inline int turn_of(int lane, std::size_t bytes, bool writes) {
  if (bytes <= 4) return lane / 32;
  if (bytes <= 8) return lane / 16;
  if (writes) return lane / 8;
  const int quad = lane % 32 / 4;
  const int turn = quad < 4 ? quad : (quad ^ 1) - 4;
  return lane / 32 * 4 + turn;
}

// One LDS instruction: cycles beyond one a turn. A bank gives one 4-byte word a cycle, to any
// number of lanes.
inline void count_lds(const Visits& visits, std::size_t visit, const Site& site) {
  std::array<std::array<std::vector<std::size_t>, BANKS>, 8> words;
  for (int lane = 0; lane < WAVE; ++lane) {
    if (visits[lane].size() <= visit) continue;
    const std::size_t first = visits[lane][visit];
    for (std::size_t word = first / 4; word * 4 < first + site.bytes; ++word)
      words[turn_of(lane, site.bytes, site.writes)][word % BANKS].push_back(word);
  }
  ++machine.report->lds_accesses;
  for (auto& turn : words) {
    std::size_t cycles = 1;
    for (auto& bank : turn) {
      std::sort(bank.begin(), bank.end());
      cycles = std::max<std::size_t>(
          cycles, std::unique(bank.begin(), bank.end()) - bank.begin());
    }
    machine.report->lds_conflicts += cycles - 1;
  }
}

// One global instruction of `bytes` a lane: the distinct segments of `size` bytes that it touches.
inline std::size_t segments(const Visits& visits, std::size_t visit, std::size_t bytes,
                            std::size_t size) {
  std::vector<std::size_t> found;
  for (const auto& lane : visits) {
    if (lane.size() <= visit) continue;
    for (std::size_t s = lane[visit] / size; s * size < lane[visit] + bytes; ++s)
      found.push_back(s);
  }
  std::sort(found.begin(), found.end());
  return std::unique(found.begin(), found.end()) - found.begin();
}

// How many accesses from `visit` on a compiler makes one of: neighbors in every lane, together 16
// aligned bytes at most.
inline std::size_t merged(const Visits& visits, std::size_t visit, std::size_t bytes) {
  for (std::size_t size = 16; size > bytes; size /= 2) {
    bool fits = true;
    for (const auto& lane : visits)
      for (std::size_t i = 0; fits && lane.size() > visit && i < size / bytes; ++i)
        fits = lane.size() > visit + i && lane[visit] % size == 0 &&
               lane[visit + i] == lane[visit] + i * bytes;
    if (fits) return size / bytes;
  }
  return 1;
}

// Narrow accesses to LDS that can still become half of a ds_read2 or ds_write2: the bytes of each,
// no bytes if there are none, and where each lane is, -1 if it isn't there. The other half may
// come after a meeting of the wave, but not after a barrier.
struct Narrow {
  std::int64_t span = 0;
  std::size_t bytes = 0;
  std::array<long, WAVE> at = {};

  // Both halves have the same lanes and are equally far apart in each.
  bool takes(const Narrow& other) const {
    long apart = 0;
    bool same = span == other.span && bytes && bytes == other.bytes;
    for (int lane = 0, first = 1; same && lane < WAVE; ++lane) {
      same = (at[lane] < 0) == (other.at[lane] < 0);
      if (at[lane] < 0) continue;
      same = same && (first || other.at[lane] - at[lane] == apart);
      apart = other.at[lane] - at[lane];
      first = 0;
    }
    return same;
  }
};
inline std::array<std::map<Site, Narrow>, MOST_THREADS / WAVE> halves;  // of each wave

// The same accesses at the widths that a compiler makes of them. tests/hip/test_compile.py holds
// the rules against the assembly of the steps.
inline void count_merged(const Visits& visits, std::size_t most, const Site& site, Narrow& half) {
  for (std::size_t visit = 0, run; visit < most; visit += run) {
    run = merged(visits, visit, site.bytes);
    const std::size_t bytes = run * site.bytes;
    if (!site.array->lds) {
      machine.report->merged_transactions += segments(visits, visit, bytes, SEGMENT);
      machine.report->merged_lines += segments(visits, visit, bytes, LINE);
      continue;
    }
    Narrow now{machine.span, bytes == 4 || bytes == 8 ? bytes : 0};
    for (int lane = 0; lane < WAVE; ++lane)
      now.at[lane] = visits[lane].size() > visit ? long(visits[lane][visit]) : -1;
    const bool closes = half.takes(now);
    machine.report->merged_lds += !closes;
    half = closes ? Narrow{} : now;
  }
}

inline void forget_accesses() {
  for (auto& wave : sites) wave.clear();
  for (auto& wave : halves) wave.clear();
}

// The wave has met: what its lanes have done since the last time are whole instructions.
inline void instructions_end(int wave) {
  if (!machine.report->counting) return;
  for (auto& [site, visits] : sites[wave]) {
    std::size_t most = 0;
    for (const auto& lane : visits) {
      most = std::max(most, lane.size());
      if (!site.array->lds) machine.report->bytes += lane.size() * site.bytes;
    }
    for (std::size_t visit = 0; visit < most; ++visit)
      if (site.array->lds)
        count_lds(visits, visit, site);
      else
        machine.report->transactions += segments(visits, visit, site.bytes, SEGMENT);
    count_merged(visits, most, site, halves[wave][site]);
    for (auto& lane : visits) lane.clear();
  }
}

// ---- races ----

// Who has touched an element of LDS between the last barrier and now. The waves of a block run in
// any order there. Here it is always the same one, which may happen to give the right numbers.
struct Touched {
  std::int64_t span;
  int writer, line;       // the wave that wrote it, from 1; where it was touched last
  std::uint32_t readers;  // a bit for each wave
};
inline std::array<Touched, LDS_BYTES> touched;  // by the first byte of the element

// written: what the access writes, null if it reads. To write what is there already is no race.
template <typename T>
void touch(const Array& array, const T* address, const T* written, int line) {
  Touched& last = touched[reinterpret_cast<const unsigned char*>(address) - machine.lds];
  if (last.span != machine.span) last = {machine.span, 0, 0, 0};
  const int wave = machine.self->number / WAVE + 1;
  const bool others_write = last.writer && last.writer != wave;
  const bool others_read = last.readers & ~(1u << (wave - 1));
  const bool race = written ? (others_write || others_read) &&
                                  std::memcmp(address, written, sizeof(T)) != 0
                            : others_write;
  if (race)
    fail("line %d %s an element of %s that another wave has %s on line %d, with no barrier between",
         line, written ? "writes" : "reads", array.name, others_write ? "written" : "read",
         last.line);
  if (written)
    last.writer = wave;
  else
    last.readers |= 1u << (wave - 1);
  last.line = line;
}

// Every access comes here, of `length` neighbours.
template <typename T>
void note(const Array& array, const T* address, std::size_t length, const T* written, int line) {
  if (array.lds)
    for (std::size_t i = 0; i < length; ++i)
      touch(array, address + i, written ? written + i : nullptr, line);
  if (machine.report->counting)
    count_access(array, address, length * sizeof(T), written != nullptr, line);
}

// ---- bounds ----

// One element, read when it is converted and written when it is assigned to: at once, so that
// `auto e = p[i]`, which would be read where e is used, is of no use.
template <typename T>
struct Element {
  T* address;
  const Array* array;
  int line;

  T get() const {
    note<T>(*array, address, 1, nullptr, line);
    return *address;
  }
  T set(T value) const {
    note<T>(*array, address, 1, &value, line);
    return *address = value;
  }
  operator T() && { return get(); }
  T operator=(T value) && { return set(value); }
  T operator=(Element&& other) && { return set(other.get()); }
  T operator+=(T value) && { return set(T(get() + value)); }
  T operator-=(T value) && { return set(T(get() - value)); }
  T operator*=(T value) && { return set(T(get() * value)); }
  T operator/=(T value) && { return set(T(get() / value)); }
};

template <typename T>
struct View {
  T* data;
  long count;
  const Array* array;

  // The address of `length` elements from `at` on, all inside.
  T* inside(Index at, long length) const {
    if (at.at < 0 || at.at + length > count)
      fail("line %d: %s[%ld] is outside its %ld elements%s", at.line, array->name,
           at.at < 0 ? at.at : at.at + length - 1, count, array->lds ? " of LDS" : "");
    return data + at.at;
  }
  auto operator[](Index at) const {
    T* address = inside(at, 1);
    if constexpr (std::is_const_v<T>) {
      note<T>(*array, address, 1, nullptr, at.line);
      return std::remove_const_t<T>(*address);
    } else {
      return Element<T>{address, array, at.line};
    }
  }
  template <typename V>
  T* aligned(Index at) const {
    T* address = inside(at, sizeof(V) / sizeof(T));
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(V))
      fail("line %d: %s[%ld] is not aligned to %zu bytes", at.line, array->name, at.at, sizeof(V));
    return address;
  }
};

template <typename T>
View<T> lds_view(unsigned char* bytes, long count, const Array& array) {
  return {reinterpret_cast<T*>(bytes), count, &array};
}

template <typename P>
struct Argument {
  explicit Argument(void* value) : value(*static_cast<P*>(value)) {}
  P value;
};

template <typename T>
struct Argument<View<T>> {
  struct Record {
    T* data;
    std::uint64_t count, element;
    const char* name;
  };
  explicit Argument(void* value) {
    const Record& record = *static_cast<Record*>(value);
    if (record.element != sizeof(T))
      refuse("%s has elements of %zu bytes, and the kernel takes elements of %zu", record.name,
             std::size_t(record.element), sizeof(T));
    array = {reinterpret_cast<const unsigned char*>(record.data), record.name, false};
    this->value = {record.data, static_cast<long>(record.count), &array};
  }
  Array array;
  View<T> value;
};

}  // namespace cpu

template <typename T>
using Global = cpu::View<T>;
template <typename T>
using Shared = cpu::View<T>;

template <typename T>
cpu::View<T> part(const cpu::View<T>& whole, long start, long count, int line = __builtin_LINE()) {
  if (start < 0 || count < 0 || start + count > whole.count)
    cpu::fail("line %d: the part %ld ... %ld of %s is outside its %ld elements", line, start,
              start + count - 1, whole.array->name, whole.count);
  return {whole.data + start, count, whole.array};
}

template <int N, typename T>
auto load(const cpu::View<T>& from, cpu::Index at) {
  Vec<std::remove_const_t<T>, N> values;
  const T* address = from.template aligned<decltype(values)>(at);
  cpu::note<const T>(*from.array, address, N, nullptr, at.line);
  std::memcpy(&values, address, sizeof values);
  return values;
}

template <int N, typename T>
void store(const cpu::View<T>& to, cpu::Index at, const Vec<T, N>& values) {
  T* address = to.template aligned<Vec<T, N>>(at);
  cpu::note<T>(*to.array, address, N, values.lanes, at.line);
  std::memcpy(address, &values, sizeof values);
}
