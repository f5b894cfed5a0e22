// Small kernels that ask the emulator one question each.
#include "portable.h"

// ---- threads, waves, blocks ----

// Where each thread thinks it is: block and thread, x + 10 y + 100 z.
__global__ void places(Global<int> out, int threads) {
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int here = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z;
  out[b * threads + t] = here + 1000 * (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);
}
ENTRY(places_, places)

// op: 0 __shfl, 1 __shfl_xor, 2 __shfl_down.
__global__ void shuffle(Global<const float> x, Global<float> y, int op, int by, int width) {
  const float mine = x[threadIdx.x];
  float got = 0.0f;
  if (op == 0) got = __shfl(mine, by, width);
  if (op == 1) got = __shfl_xor(mine, by, width);
  if (op == 2) got = __shfl_down(mine, by, width);
  y[threadIdx.x] = got;
}
ENTRY(shuffle_, shuffle)

// The sum over a wave, first taken `start` lanes apart: 32 in a kernel written for warps is 16.
__global__ void wave_sum(Global<const float> x, Global<float> y, int start) {
  float sum = x[threadIdx.x];
  for (int step = start; step > 0; step /= 2) sum += __shfl_xor(sum, step);
  y[threadIdx.x] = sum;
}
ENTRY(wave_sum_, wave_sum)

// The odd lanes vote inside their branch, the even ones after it; low 32 bits, high 32 bits.
__global__ void votes(Global<int> low, Global<int> high) {
  const int t = threadIdx.x;
  LaneMask mask;
  if (t % 2) {
    mask = __ballot(t % 3 == 0);
  } else {
    mask = __ballot(1);
  }
  low[t] = int(mask);
  high[t] = int(mask >> 32);
}
ENTRY(votes_, votes)

// Lane i leaves a loop after i + 1 turns; how many lanes were there in its last one, and after it.
__global__ void turns(Global<int> last, Global<int> after) {
  int there = 0;
  for (int turn = 0; turn <= int(threadIdx.x); ++turn) there = __builtin_popcountll(__ballot(1));
  last[threadIdx.x] = there;
  after[threadIdx.x] = __builtin_popcountll(__ballot(1));
}
ENTRY(turns_, turns)

// A lane that left is asked for its value.
__global__ void from_nobody(Global<int> y) {
  if (threadIdx.x == 7) return;
  y[threadIdx.x] = __shfl(int(threadIdx.x), 7);
}
ENTRY(from_nobody_, from_nobody)

// A block's values in reverse, through LDS.
__global__ void reverse(Global<const float> x, Global<float> y, int n) {
  SHARED(float, tile, 1024);
  const long first = long(blockIdx.x) * n;
  tile[threadIdx.x] = x[first + threadIdx.x];
  __syncthreads();
  y[first + threadIdx.x] = tile[n - 1 - threadIdx.x];
}
ENTRY(reverse_, reverse)

// ---- what goes wrong ----

__global__ void some_return(Global<float> y, int stay) {
  if (int(threadIdx.x) >= stay) return;
  y[0] = 1.0f;
  __syncthreads();  // Not all of them come here.
}
ENTRY(some_return_, some_return)

__global__ void two_barriers(Global<float> y) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    y[0] = 1.0f;
    __syncthreads();
  }
}
ENTRY(two_barriers_, two_barriers)

// what: 0 reads x, 1 writes y, 2 reads LDS, 3 writes LDS, at `at` in thread 5 of block 1.
__global__ void stray(Global<const float> x, Global<float> y, int what, int at) {
  SHARED(float, tile, 48);
  if (blockIdx.x != 1 || threadIdx.x != 5) return;
  if (what == 0) y[0] = x[at];
  if (what == 1) y[at] = 1.0f;
  if (what == 2) y[0] = tile[at];
  if (what == 3) tile[at] = 1.0f;
}
ENTRY(stray_, stray)

__global__ void window(Global<const float> x, Global<float> y, int start, int length, int at) {
  auto some = part(x, start, length);
  y[0] = some[at];
}
ENTRY(window_, window)

__global__ void vectors(Global<const float> x, Global<float> y, int source, int target) {
  store<4>(y, target, load<4>(x, source));
}
ENTRY(vectors_, vectors)

// Reads LDS that nobody wrote, then writes it for the next block.
__global__ void unwritten(Global<float> y, Global<Half> h) {
  SHARED(float, tile, 64);
  SHARED(Half, halves, 64);
  const int t = threadIdx.x, i = blockIdx.x * 64 + t;
  y[i] = tile[t];
  h[i] = halves[t];
  tile[t] = 1.0f;
  halves[t] = Half(1.0f);
}
ENTRY(unwritten_, unwritten)

__global__ void much(Global<float> y) {
  SHARED(float, first, 8192);
  SHARED(float, second, 8193);
  first[0] = second[0] = y[0] = 1.0f;
}
ENTRY(much_, much)

// LDS between two waves of 64. way: 0 reads what the other wave wrote, 1 writes over what it reads,
// 2 both write, 3 both write the same, 4 reads within its own wave, 5 with a barrier between.
__global__ void meeting(Global<float> y, int way) {
  SHARED(float, tile, 128);
  const int t = threadIdx.x, wave = t / 64;
  tile[t] = float(t);
  if (way == 0) y[t] = tile[t % 64];  // Reads too early.
  if (way == 4) y[t] = tile[wave * 64];
  __syncthreads();
  if (way == 1 && wave == 0) y[t] = tile[t + 64];
  if (way == 1 && wave == 1) store<4>(tile, 64, Vec<float, 4>{});  // Writes too early.
  if (way == 2) tile[7] = float(wave);  // Both write.
  if (way == 3) tile[7] = 3.0f;
  if (way == 5) y[t] = tile[127 - t];
}
ENTRY(meeting_, meeting)

__global__ void scaled(Global<float> y, float factor, int n, long) { y[n] *= factor; }
ENTRY(scaled_, scaled)
__global__ void changed(Global<float> y, Global<const int> n, float by) {
  y[0] += by;
  y[1] -= by;
  y[2] *= by;
  y[3] /= by;
  y[4] = y[5] = y[n[0]];
}
ENTRY(changed_, changed)

// ---- what is counted ----

// Every lane accesses LDS once: row lane % rows, rows `stride` elements apart, and the lanes past
// `rows` the next `N` columns.
template <int N>
__device__ int place(int stride, int rows) {
  return int(threadIdx.x) % rows * stride + int(threadIdx.x) / rows * N;
}
template <typename T, int N>
__global__ void lds_read(Global<float> y, int stride, int rows) {
  SHARED(T, tile, 65536 / sizeof(T));
  if constexpr (N == 1) {
    y[threadIdx.x] = float(tile[place<N>(stride, rows)]);
  } else {
    y[threadIdx.x] = float(load<N>(tile, place<N>(stride, rows))[0]);
  }
}
template <typename T, int N>
__global__ void lds_write(int stride, int rows) {
  SHARED(T, tile, 65536 / sizeof(T));
  if constexpr (N == 1) {
    tile[place<N>(stride, rows)] = T(1.0f);
  } else {
    store<N>(tile, place<N>(stride, rows), Vec<T, N>{});
  }
}
ENTRY(lds_read_2, lds_read<Half, 1>)
ENTRY(lds_read_4, lds_read<float, 1>)
ENTRY(lds_read_8, lds_read<Half, 4>)
ENTRY(lds_read_16, lds_read<Half, 8>)
ENTRY(lds_write_2, lds_write<Half, 1>)
ENTRY(lds_write_4, lds_write<float, 1>)
ENTRY(lds_write_8, lds_write<Half, 4>)
ENTRY(lds_write_16, lds_write<Half, 8>)

// Lane i reads LDS i % turns + 1 times, lanes below `quiet` not at all.
__global__ void diverging(int turns, int quiet) {
  SHARED(float, tile, 64);
  float sum = 0.0f;
  if (int(threadIdx.x) >= quiet)
    for (int i = 0; i <= int(threadIdx.x) % turns; ++i) sum += tile[threadIdx.x];
  if (sum == 12345.0f) tile[0] = sum;
}
ENTRY(diverging_, diverging)

__global__ void global_read(Global<const float> x, Global<float> y, int stride) {
  const float got = x[threadIdx.x * stride];
  if (got == 12345.0f) y[0] = got;
}
ENTRY(global_read_, global_read)

__global__ void global_read_vectors(Global<const float> x, Global<float> y) {
  const float got = load<4>(x, 4 * threadIdx.x)[0];
  if (got == 12345.0f) y[0] = got;
}
ENTRY(global_read_vectors_, global_read_vectors)

__global__ void update(Global<float> y) {
  y[threadIdx.x] += 1.0f;
  y[threadIdx.x] *= 2.0f;
}
ENTRY(update_, update)

// Each lane reads the same 32 numbers, `gap` apart.
__global__ void run(Global<const float> x, Global<float> y, int start, int gap) {
  float sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += x[start + i * gap];
  y[threadIdx.x] = sum;
}
ENTRY(run_, run)

// Two reads of LDS, `far` apart, and in each lane further apart by `spread` times its number.
__global__ void pair(Global<float> y, int far, int spread, int barrier) {
  SHARED(float, tile, 128);
  float sum = 0.0f;
  for (int i = 0; i < 2; ++i) {
    sum += tile[i * (far + spread * int(threadIdx.x))];
    if (barrier) __syncthreads();
  }
  y[threadIdx.x] = sum;
}
ENTRY(pair_, pair)
