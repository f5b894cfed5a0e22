// HIP's own headers for the emulator, for a source that hipify has made of a CUDA one: the host's
// calls, launches, dynamic LDS, and CUDA's warp operations, which hipify leaves as they are.
// Pointers of such a kernel are plain: nothing bounds them.
#pragma once

#include "portable.h"

#include <cstdlib>

#pragma GCC visibility push(hidden)

using __half = Half;

#define __shared__ static  // blocks run one after another; the dynamic form is below

// ---- the host's calls: device memory is host memory ----

using hipError_t = int;
using hipStream_t = void*;
enum { hipSuccess = 0, hipErrorOutOfMemory = 2, hipErrorLaunchFailure = 719 };
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 };

namespace cpu {

inline Report host_report = {};
inline hipError_t last_error = hipSuccess;

// Dynamic LDS lies at the end, what SHARED places at the beginning.
template <typename T>
T* dynamic_lds() { return reinterpret_cast<T*>(machine.lds + LDS_BYTES - machine.dynamic_bytes); }

template <typename... P, typename... A>
void launch_here(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t dynamic, A... given) {
  std::tuple<P...> values(given...);
  void* pointers[sizeof...(P) + 1] = {};
  std::apply([&](auto&... each) { int i = 0; ((pointers[i++] = &each), ...); }, values);
  const unsigned blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
  host_report = {};
  machine.dynamic_bytes = (dynamic + 15) / 16 * 16;
  if (launch(kernel, blocks, threads, pointers, &host_report)) last_error = hipErrorLaunchFailure;
  machine.dynamic_bytes = 0;
}

}  // namespace cpu

#define HIP_DYNAMIC_SHARED(T, name) T* name = ::cpu::dynamic_lds<T>();
#define hipLaunchKernelGGL(kernel, grid, block, dynamic, stream, ...) \
  ::cpu::launch_here(kernel, grid, block, dynamic, __VA_ARGS__)

template <typename T>
hipError_t hipMalloc(T** memory, std::size_t bytes) {
  *memory = static_cast<T*>(std::malloc(bytes));
  return *memory ? hipSuccess : hipErrorOutOfMemory;
}
inline hipError_t hipFree(void* memory) {
  std::free(memory);
  return hipSuccess;
}
inline hipError_t hipMemcpy(void* to, const void* from, std::size_t bytes, hipMemcpyKind) {
  std::memcpy(to, from, bytes);
  return hipSuccess;
}
inline hipError_t hipDeviceSynchronize() { return std::exchange(cpu::last_error, hipSuccess); }

// Why the last launch failed, "" if it did not.
EXPORT const char* emulator_message() { return cpu::host_report.message; }

// ---- warp operations ----

namespace cpu {
inline void heed(LaneMask mask, const char* what, int line) {
  if (mask >> lane() & 1) return;
  fail("lane %d comes to %s of line %d, and the mask 0x%llx leaves it out", lane(), what, line,
       mask);
}
}  // namespace cpu

template <typename T>
T __shfl_sync(LaneMask mask, T value, int lane, int width = WAVE, int line = __builtin_LINE()) {
  cpu::heed(mask, "__shfl_sync", line);
  return __shfl(value, lane, width, line);
}
template <typename T>
T __shfl_xor_sync(LaneMask mask, T value, int lanes, int width = WAVE,
                  int line = __builtin_LINE()) {
  cpu::heed(mask, "__shfl_xor_sync", line);
  return __shfl_xor(value, lanes, width, line);
}
template <typename T>
T __shfl_down_sync(LaneMask mask, T value, unsigned delta, int width = WAVE,
                   int line = __builtin_LINE()) {
  cpu::heed(mask, "__shfl_down_sync", line);
  return __shfl_down(value, delta, width, line);
}
inline LaneMask __ballot_sync(LaneMask mask, int predicate, int line = __builtin_LINE()) {
  cpu::heed(mask, "__ballot_sync", line);
  return __ballot(predicate, line);
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }

#pragma GCC visibility pop
