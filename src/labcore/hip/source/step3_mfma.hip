// Matrix cores: a wavefront owns TILE rows of queries, and both products are matrix instructions.
//
// The products are turned over: S^T = K Q^T, then O^T += V^T P^T. Of a result [TILE, TILE] a lane
// gets the column lane % TILE, so all its scores are those of one query: the softmax needs no other
// lanes than the GROUPS that share this query, and `shrink` is one number a lane. And the four rows
// of S^T in four neighbouring registers are just the four keys that the same lane has to bring as
// its part of P^T: the weights go into the second product from the registers they are in.
// mfma.py has the maps.
#include "portable.h"

#if defined(ON_NVIDIA)
#error "steps 3 and 4 are written for AMD's matrix cores; for NVIDIA compile steps 1 and 2"
#endif

template <typename T, int D>
struct Shape {
  // The smaller instruction keeps less in registers; each read of LDS serves half as many queries.
  static constexpr int TILE = sizeof(T) == 2 && D == 64 ? 16 : 32;  // rows of a wavefront
  static constexpr int THREADS = 256;
  static constexpr int QUERIES = THREADS / WAVE * TILE;  // rows of a block
  static constexpr int KEYS = 32;                        // of a tile
  static constexpr int STRIDE = D + 4;  // of a row in LDS: two or four banks further on each
};

// c + a b, four values along k from each lane: 32 x 8 times 8 x 32, 16 x 16 times 16 x 16.
__device__ inline Vec<float, 16> multiply(Vec<Half, 4> a, Vec<Half, 4> b, Vec<float, 16> c) {
  return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}
__device__ inline Vec<float, 4> multiply(Vec<Half, 4> a, Vec<Half, 4> b, Vec<float, 4> c) {
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
__device__ inline Vec<float, 16> multiply(Vec<BFloat, 4> a, Vec<BFloat, 4> b, Vec<float, 16> c) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(raw(a), raw(b), c, 0, 0, 0);
}
__device__ inline Vec<float, 4> multiply(Vec<BFloat, 4> a, Vec<BFloat, 4> b, Vec<float, 4> c) {
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(raw(a), raw(b), c, 0, 0, 0);
}
// An fp32 instruction takes one value from each lane. The terms of a sum over k may come in any
// order, so four instructions make the same product of the same four values.
__device__ inline Vec<float, 16> multiply(Vec<float, 4> a, Vec<float, 4> b, Vec<float, 16> c) {
  UNROLL
  for (int i = 0; i < 4; ++i) c = __builtin_amdgcn_mfma_f32_32x32x2f32(a[i], b[i], c, 0, 0, 0);
  return c;
}

// Weights are at most 2^LIFT instead of 1. CDNA2 takes fp16 below 2^-14 for zero: so it loses
// weights below 2^-29 of the row's largest. The division by `total` takes the factor out again.
// bf16 and fp32 have the room, and would not need it.
constexpr float LIFT = 15.0f;

template <typename T, int D, bool CAUSAL>
__global__ void __launch_bounds__((Shape<T, D>::THREADS))
attention_forward(Global<const T> q, Global<const T> k, Global<const T> v, Global<T> out,
                  Global<float> lse, int q_len, int k_len, int group_size, float scale) {
  constexpr int QUERIES = Shape<T, D>::QUERIES, KEYS = Shape<T, D>::KEYS;
  constexpr int TILE = Shape<T, D>::TILE, STRIDE = Shape<T, D>::STRIDE;
  constexpr int GROUPS = WAVE / TILE;     // lanes that share a query
  constexpr int DEPTH = 4 * GROUPS;       // of one product
  constexpr int RESULTS = TILE / GROUPS;  // values of its result in a lane
  SHARED(T, key_tile, KEYS * STRIDE);
  SHARED(T, value_tile, KEYS * STRIDE);
  const int lane = threadIdx.x % WAVE, column = lane % TILE, group = lane / TILE;
  const long head = blockIdx.y, key_head = blockIdx.y / group_size;
  const int first = blockIdx.x * QUERIES;
  const int mine = threadIdx.x / WAVE * TILE + column;
  const int row = first + mine;
  const int rows = q_len - first < QUERIES ? q_len - first : QUERIES;
  auto queries = part(q, (head * q_len + first) * D, long(rows) * D);
  auto keys = part(k, key_head * k_len * D, long(k_len) * D);
  auto values = part(v, key_head * k_len * D, long(k_len) * D);
  auto outputs = part(out, (head * q_len + first) * D, long(rows) * D);
  auto sums = part(lse, head * q_len, q_len);

  // A matrix instruction needs every lane: one past q_len computes the last row once more.
  const int source = mine < rows ? mine : rows - 1;
  const float to_log2 = scale * 1.44269504f;
  Vec<T, 4> query[D / DEPTH];
  Vec<float, RESULTS> mean[D / TILE] = {};
  UNROLL
  for (int s = 0; s < D / DEPTH; ++s)
    query[s] = load<4>(queries, long(source) * D + DEPTH * s + 4 * group);
  float top = -INF, total = 0.0f;  // total: of the keys whose scores this lane gets

  const int seen_by_block = CAUSAL && first + rows < k_len ? first + rows : k_len;
  for (int tile = 0; tile < seen_by_block; tile += KEYS) {
    const int end = k_len - tile < KEYS ? k_len - tile : KEYS;
    __syncthreads();
    for (int i = threadIdx.x; i < KEYS * D; i += Shape<T, D>::THREADS) {
      const int j = i / D, at = j * STRIDE + i % D;
      key_tile[at] = j < end ? T(keys[long(tile) * D + i]) : T(0.0f);
      value_tile[at] = j < end ? T(values[long(tile) * D + i]) : T(0.0f);
    }
    __syncthreads();

    // Value r of a lane is the score of key DEPTH * (r / 4) + 4 * group + r % 4 of TILE.
    Vec<float, RESULTS> score[KEYS / TILE] = {};
    float higher = top;
    UNROLL
    for (int t = 0; t < KEYS / TILE; ++t) {
      UNROLL
      for (int s = 0; s < D / DEPTH; ++s) {
        const int at = (TILE * t + column) * STRIDE + DEPTH * s + 4 * group;
        score[t] = multiply(load<4>(key_tile, at), query[s], score[t]);
      }
      UNROLL
      for (int r = 0; r < RESULTS; ++r) {
        const int j = TILE * t + DEPTH * (r / 4) + 4 * group + r % 4;
        const bool seen = j < end && (!CAUSAL || tile + j <= row);
        score[t][r] = seen ? score[t][r] : -INF;
        higher = fmaxf(higher, score[t][r]);
      }
    }
    for (int other = TILE; other < WAVE; other *= 2)
      higher = fmaxf(higher, __shfl_xor(higher, other));
    const float shrink = exp2f((top - higher) * to_log2);
    total *= shrink;
    UNROLL
    for (int u = 0; u < D / TILE; ++u) {
      UNROLL
      for (int r = 0; r < RESULTS; ++r) mean[u][r] *= shrink;
    }
    top = higher;

    UNROLL
    for (int t = 0; t < KEYS / TILE; ++t) {
      UNROLL
      for (int s = 0; s < TILE / DEPTH; ++s) {
        Vec<T, 4> weight, value;
        UNROLL
        for (int e = 0; e < 4; ++e) {
          const float unrounded = exp2f((score[t][4 * s + e] - top) * to_log2 + LIFT);
          total += unrounded;
          weight[e] = T(unrounded);
        }
        const int j = TILE * t + DEPTH * s + 4 * group;
        UNROLL
        for (int u = 0; u < D / TILE; ++u) {
          UNROLL
          for (int e = 0; e < 4; ++e)
            value[e] = value_tile[(j + e) * STRIDE + TILE * u + column];
          mean[u] = multiply(value, weight, mean[u]);
        }
      }
    }
  }

  for (int other = TILE; other < WAVE; other *= 2) total += __shfl_xor(total, other);
  if (mine >= rows) return;
  const float share = 1.0f / total;
  UNROLL
  for (int u = 0; u < D / TILE; ++u) {
    UNROLL
    for (int s = 0; s < TILE / DEPTH; ++s) {
      Vec<T, 4> four;
      UNROLL
      for (int e = 0; e < 4; ++e) four[e] = T(mean[u][4 * s + e] * share);
      store<4>(outputs, long(mine) * D + TILE * u + DEPTH * s + 4 * group, four);
    }
  }
  if (group == 0) sums[row] = top * scale + (log2f(total) - LIFT) * 0.693147181f;
}

ATTENTION_ENTRIES
ATTENTION_FORMS(bf16, BFloat)
