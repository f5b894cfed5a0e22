// The CUDA original: one warp owns one row of queries, one lane one key of a tile.
//
// It is right on NVIDIA, and written in that machine's terms: a warp has 32 lanes, so a vote over
// it is an unsigned int, every lane's mask is 0xffffffff, a lane is threadIdx.x % 32, and exp2 is
// one line of PTX.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int ROWS = 4;   // of queries in a block, a warp each
constexpr int KEYS = 32;  // of a tile, a lane each

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffff, x, step);
  return __shfl_sync(0xffffffff, x, 0);
}

template <typename T, int D, bool CAUSAL>
__global__ void attention_forward(const T* q, const T* k, const T* v, T* out, float* lse,
                                  int q_len, int k_len, float scale) {
  extern __shared__ float tiles[];
  float* query = tiles;                           // [ROWS][D]
  float* key_tile = query + ROWS * D;             // [KEYS][D + 1]: a column lies in 32 banks
  float* value_tile = key_tile + KEYS * (D + 1);  // [KEYS][D]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long head = blockIdx.y;
  const int row = blockIdx.x * ROWS + warp;
  const T* queries = q + head * q_len * D;
  const T* keys = k + head * k_len * D;
  const T* values = v + head * k_len * D;

  const float to_log2 = scale * 1.44269504f;
  for (int d = lane; d < D; d += 32)
    query[warp * D + d] = row < q_len ? float(queries[long(row) * D + d]) * to_log2 : 0.0f;
  float mean[D / 32] = {};
  float top = -INFINITY, total = 0.0f;

  const int seen = CAUSAL && row + 1 < k_len ? row + 1 : k_len;
  for (int tile = 0; tile < k_len; tile += KEYS) {
    const int end = k_len - tile < KEYS ? k_len - tile : KEYS;
    __syncthreads();
    for (int i = threadIdx.x; i < end * D; i += ROWS * 32) {
      key_tile[i / D * (D + 1) + i % D] = float(keys[long(tile) * D + i]);
      value_tile[i] = float(values[long(tile) * D + i]);
    }
    __syncthreads();
    unsigned int mine = __ballot_sync(0xffffffff, tile + lane < seen && lane < end);
    if (mine == 0) continue;  // causal: the tile lies wholly after this warp's row

    float score = -INFINITY;
    if (mine >> lane & 1) {
      score = 0.0f;
      for (int d = 0; d < D; ++d) score += query[warp * D + d] * key_tile[lane * (D + 1) + d];
    }
    const float higher = fmaxf(top, warp_max(score));
    const float shrink = power_of_two(top - higher);
    const float weight = power_of_two(score - higher);
    total = total * shrink + warp_sum(weight);
    for (int e = 0; e < D / 32; ++e) mean[e] *= shrink;
    for (unsigned int left = mine; left != 0; left &= left - 1) {
      const int j = __ffs(left) - 1;
      const float share = __shfl_sync(0xffffffff, weight, j);
      for (int e = 0; e < D / 32; ++e) mean[e] += share * value_tile[j * D + e * 32 + lane];
    }
    top = higher;
  }

  if (row >= q_len) return;
  for (int e = 0; e < D / 32; ++e)
    out[(head * q_len + row) * D + e * 32 + lane] = T(mean[e] / total);
  if (lane == 0) lse[head * q_len + row] = (top + log2f(total)) * 0.693147181f;
}

// Host memory in, host memory out. Returns CUDA's error code, 0 where there was none.
template <typename T, int D, bool CAUSAL>
int run(const T* q, const T* k, const T* v, T* out, float* lse, int heads, int q_len, int k_len,
        float scale) {
  const size_t rows = size_t(heads) * q_len, columns = size_t(heads) * k_len;
  T *q_device, *k_device, *v_device, *out_device;
  float* lse_device;
  cudaMalloc(&q_device, rows * D * sizeof(T));
  cudaMalloc(&k_device, columns * D * sizeof(T));
  cudaMalloc(&v_device, columns * D * sizeof(T));
  cudaMalloc(&out_device, rows * D * sizeof(T));
  cudaMalloc(&lse_device, rows * sizeof(float));
  cudaMemcpy(q_device, q, rows * D * sizeof(T), cudaMemcpyHostToDevice);
  cudaMemcpy(k_device, k, columns * D * sizeof(T), cudaMemcpyHostToDevice);
  cudaMemcpy(v_device, v, columns * D * sizeof(T), cudaMemcpyHostToDevice);

  const unsigned blocks = (q_len + ROWS - 1) / ROWS;
  const size_t shared_bytes = (ROWS * D + KEYS * (D + 1) + KEYS * D) * sizeof(float);
  attention_forward<T, D, CAUSAL><<<dim3{blocks, unsigned(heads)}, ROWS * 32, shared_bytes>>>(
      q_device, k_device, v_device, out_device, lse_device, q_len, k_len, scale);
  const cudaError_t error = cudaDeviceSynchronize();

  cudaMemcpy(out, out_device, rows * D * sizeof(T), cudaMemcpyDeviceToHost);
  cudaMemcpy(lse, lse_device, rows * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(q_device);
  cudaFree(k_device);
  cudaFree(v_device);
  cudaFree(out_device);
  cudaFree(lse_device);
  return error;
}

#define HOST(name, T, D, CAUSAL)                                                               \
  extern "C" int name(const T* q, const T* k, const T* v, T* out, float* lse, int heads,       \
                      int q_len, int k_len, float scale) {                                     \
    return run<T, D, CAUSAL>(q, k, v, out, lse, heads, q_len, k_len, scale);                   \
  }

HOST(attention_f32_d64_full, float, 64, false)
HOST(attention_f32_d64_causal, float, 64, true)
HOST(attention_f32_d128_full, float, 128, false)
HOST(attention_f32_d128_causal, float, 128, true)
HOST(attention_f16_d64_full, __half, 64, false)
HOST(attention_f16_d64_causal, __half, 64, true)
HOST(attention_f16_d128_full, __half, 128, false)
HOST(attention_f16_d128_causal, __half, 128, true)
