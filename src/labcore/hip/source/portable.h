// What a kernel of this folder is written in: HIP's own spellings, and the few names that have to
// mean something else on each of four targets.
//
//   AMD, hipcc        HIP's headers and runtime
//   AMD, clang alone  -nogpuinc -nogpulib -DNO_HIP_RUNTIME: no header at all, device code only
//   NVIDIA, nvcc      a wavefront is a warp of 32
//   CPU, g++          cpu.h: fibers for threads; -DCHECKED adds bounds and counters
//
// Global<T>             a pointer into global memory
// SHARED(T, name, n)    an array in LDS; Shared<T> is how a device function takes it
// part(p, start, n)     a window of either, with bounds of its own where bounds are checked
// load<N>(p, i), store<N>(p, i, v)   N neighbours in one instruction, aligned to their size
// WAVE, lane_id(), LaneMask          the wavefront: 64 lanes on AMD, 32 on NVIDIA
// Half, BFloat, Vec<T, N>            fp16, bf16, and N values of one type
// ENTRY(name, kernel<...>)           a C function that the host launches the kernel by
#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__HIP__)
#define ON_AMD 1
#elif defined(__CUDACC__)
#define ON_NVIDIA 1
#else
#define ON_CPU 1
#endif

#if defined(ON_CPU)
#include "cpu.h"
#else

#if defined(ON_NVIDIA)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif !defined(NO_HIP_RUNTIME)
#include <hip/hip_runtime.h>
#endif

// ---- the wavefront ----

#if defined(ON_NVIDIA)

constexpr int WAVE = 32;
using LaneMask = unsigned;
using Half = __half;
#define WAVES_PER_EU(waves)

__device__ inline int lane_id() { return threadIdx.x % WAVE; }
__device__ inline void wave_barrier() { __syncwarp(); }

// CUDA's forms name the lanes that take part; here it is always all of them.
template <typename T>
__device__ inline T __shfl(T value, int lane, int width = WAVE) {
  return __shfl_sync(0xffffffffu, value, lane, width);
}
template <typename T>
__device__ inline T __shfl_xor(T value, int mask, int width = WAVE) {
  return __shfl_xor_sync(0xffffffffu, value, mask, width);
}
template <typename T>
__device__ inline T __shfl_down(T value, unsigned delta, int width = WAVE) {
  return __shfl_down_sync(0xffffffffu, value, delta, width);
}
__device__ inline LaneMask __ballot(int predicate) {
  return __ballot_sync(0xffffffffu, predicate);
}

#else  // AMD

constexpr int WAVE = 64;
using LaneMask = unsigned long long;
using Half = _Float16;
#define WAVES_PER_EU(waves) __attribute__((amdgpu_waves_per_eu(waves)))

#if defined(NO_HIP_RUNTIME)

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct Place {
  unsigned x, y, z;
};
__device__ inline Place thread_place() {
  return {__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
          __builtin_amdgcn_workitem_id_z()};
}
__device__ inline Place block_place() {
  return {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
          __builtin_amdgcn_workgroup_id_z()};
}
__device__ inline Place block_size() {
  return {__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
          __builtin_amdgcn_workgroup_size_z()};
}
__device__ inline Place grid_size() {
  return {__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(),
          __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(),
          __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z()};
}
#define threadIdx thread_place()
#define blockIdx block_place()
#define blockDim block_size()
#define gridDim grid_size()

__device__ inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// v_exp_f32 and v_log_f32 are to base 2. A subnormal argument or result becomes 0.
__device__ inline float exp2f(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ inline float log2f(float x) { return __builtin_amdgcn_logf(x); }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }

__device__ inline int lane_id() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
template <typename T>
__device__ inline T from_lane(T value, int lane) {
  static_assert(sizeof(T) == 4, "a lane hands over one register");
  int bits = __builtin_amdgcn_ds_bpermute(lane << 2, __builtin_bit_cast(int, value));
  return __builtin_bit_cast(T, bits);
}
// Within groups of `width` lanes, a power of two. Past a group's end a lane reads itself.
template <typename T>
__device__ inline T __shfl(T value, int lane, int width = WAVE) {
  return from_lane(value, (lane_id() & -width) | (lane & (width - 1)));
}
template <typename T>
__device__ inline T __shfl_xor(T value, int mask, int width = WAVE) {
  const int from = lane_id() ^ mask, end = (lane_id() & -width) + width;
  return from_lane(value, from < end ? from : lane_id());
}
template <typename T>
__device__ inline T __shfl_down(T value, unsigned delta, int width = WAVE) {
  const int from = lane_id() + delta, end = (lane_id() & -width) + width;
  return from_lane(value, from < end ? from : lane_id());
}
__device__ inline LaneMask __ballot(int predicate) {
  return __builtin_amdgcn_ballot_w64(predicate != 0);
}

#else

__device__ inline int lane_id() { return __lane_id(); }

#endif  // NO_HIP_RUNTIME

__device__ inline void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// The compiler moves no instruction across.
__device__ inline void keep_order() { __builtin_amdgcn_sched_barrier(0); }

#endif  // AMD

// ---- memory ----

#include "bfloat.h"

#define UNROLL _Pragma("unroll")

template <typename T>
using Global = T* __restrict__;
template <typename T>
using Shared = T*;

#define SHARED(T, name, count) __shared__ __attribute__((aligned(16))) T name[count]

template <typename T>
__device__ inline T* part(T* whole, long start, long) { return whole + start; }

#if defined(ON_AMD)
template <typename T, int N>
struct VecOf { using type = T __attribute__((ext_vector_type(N))); };
// An array of structs the compiler would take apart as soon as it is loaded, and wait for it.
template <int N>
struct BFloats {
  struct One {
    BFloats& all;
    int i;
    __device__ operator BFloat() const { return static_cast<const BFloats&>(all)[i]; }
    __device__ void operator=(BFloat value) const { all.bits[i] = value.bits; }
    __device__ void operator=(const One& other) const { *this = BFloat(other); }
  };
  typename VecOf<short, N>::type bits;
  __device__ One operator[](int i) { return {*this, i}; }
  __device__ BFloat operator[](int i) const {
    BFloat value;
    value.bits = bits[i];
    return value;
  }
};
template <int N>
struct VecOf<BFloat, N> { using type = BFloats<N>; };
template <typename T, int N>
using Vec = typename VecOf<T, N>::type;
#else
template <typename T, int N>
struct alignas(N * sizeof(T)) Vec {
  T lanes[N];
  __device__ T& operator[](int i) { return lanes[i]; }
  __device__ const T& operator[](int i) const { return lanes[i]; }
};
#endif

template <int N, typename T>
__device__ inline Vec<T, N> load(const T* from, long i) {
  return *reinterpret_cast<const Vec<T, N>*>(from + i);
}
template <int N, typename T>
__device__ inline void store(T* to, long i, Vec<T, N> values) {
  *reinterpret_cast<Vec<T, N>*>(to + i) = values;
}

// ---- the host's side ----

// arguments[i] points at the i-th argument; of a Global that is a record whose first word is the
// device's address. Returns the runtime's error code, 0 where there was none.
#if defined(NO_HIP_RUNTIME)
#define ENTRY(name, ...) \
  EXPORT const void* name() { return reinterpret_cast<const void*>(&__VA_ARGS__); }
#elif defined(ON_NVIDIA)
#define ENTRY(name, ...)                                                                    \
  EXPORT int name(const unsigned* grid, const unsigned* block, void** arguments,            \
                  void* stream) {                                                           \
    return cudaLaunchKernel(reinterpret_cast<const void*>(&__VA_ARGS__),                    \
                            dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), \
                            arguments, 0, static_cast<cudaStream_t>(stream));               \
  }
#else
#define ENTRY(name, ...)                                                                    \
  EXPORT int name(const unsigned* grid, const unsigned* block, void** arguments,            \
                  void* stream) {                                                           \
    return hipLaunchKernel(reinterpret_cast<const void*>(&__VA_ARGS__),                     \
                           dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), \
                           arguments, 0, static_cast<hipStream_t>(stream));                 \
  }
#endif

#endif  // not ON_CPU

constexpr float INF = __builtin_inff();

// The bits of bf16 values, as the matrix instructions' builtins take them.
__device__ inline Vec<short, 4> raw(const Vec<BFloat, 4>& values) {
  Vec<short, 4> bits;
  __builtin_memcpy(&bits, &values, sizeof bits);
  return bits;
}

// The four forms of a step in one type.
#define ATTENTION_FORMS(name, T)                                                                \
  ENTRY(attention_forward_##name##_d64_full, attention_forward<T, 64, false>)                   \
  ENTRY(attention_forward_##name##_d64_causal, attention_forward<T, 64, true>)                  \
  ENTRY(attention_forward_##name##_d128_full, attention_forward<T, 128, false>)                 \
  ENTRY(attention_forward_##name##_d128_causal, attention_forward<T, 128, true>)

// The shape of a block, which the host's grid follows. It hangs on a type's size alone.
#define BLOCK_SHAPE                                                                             \
  template <typename T, int D>                                                                  \
  void tell_block(int* queries, int* threads) {                                                 \
    *queries = Shape<T, D>::QUERIES;                                                            \
    *threads = Shape<T, D>::THREADS;                                                            \
  }                                                                                             \
  EXPORT void attention_block(int half, int dim, int* queries, int* threads) {                  \
    if (dim == 64) (half ? tell_block<Half, 64> : tell_block<float, 64>)(queries, threads);     \
    if (dim == 128) (half ? tell_block<Half, 128> : tell_block<float, 128>)(queries, threads);  \
  }

// What every step has; the steps on matrix cores have ATTENTION_FORMS(bf16, BFloat) besides.
#define ATTENTION_ENTRIES ATTENTION_FORMS(f32, float) ATTENTION_FORMS(f16, Half) BLOCK_SHAPE
