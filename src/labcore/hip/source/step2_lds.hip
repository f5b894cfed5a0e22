// LDS: a thread still owns one row of queries, and a block fetches each tile of keys and values
// once for all its rows.
//
// Global memory is read and written by neighbouring lanes at neighbouring addresses. In LDS all
// lanes read the same key, which is one access for all of them; rows that pass through LDS lie an
// odd number of 4-byte words apart, so that 32 lanes find 32 rows of one column in 32 banks.
#include "portable.h"

template <typename T, int D>
struct Shape {
  static constexpr int QUERIES = 128;  // rows of a block
  static constexpr int KEYS = 32;      // of a tile
  static constexpr int THREADS = 128;
};

constexpr int SLICE = 32;  // columns of a row that pass through LDS at once
template <typename T>
constexpr int STRIDE = SLICE + 4 / sizeof(T);  // one 4-byte word more

// The block's rows of `from`, each to the thread that owns it. Rows past `left` are zeros.
template <typename T, int D>
__device__ void read_rows(Global<const T> from, Shared<T> stage, int left, float (&mine)[D]) {
  UNROLL
  for (int column = 0; column < D; column += SLICE) {
    __syncthreads();
    for (int i = threadIdx.x; i < Shape<T, D>::QUERIES * SLICE; i += Shape<T, D>::THREADS) {
      const int row = i / SLICE, d = i % SLICE;
      stage[row * STRIDE<T> + d] = row < left ? T(from[long(row) * D + column + d]) : T(0.0f);
    }
    __syncthreads();
    UNROLL
    for (int d = 0; d < SLICE; ++d) mine[column + d] = float(stage[threadIdx.x * STRIDE<T> + d]);
  }
}

// The way back.
template <typename T, int D>
__device__ void write_rows(Global<T> to, Shared<T> stage, int left, const float (&mine)[D]) {
  UNROLL
  for (int column = 0; column < D; column += SLICE) {
    __syncthreads();
    UNROLL
    for (int d = 0; d < SLICE; ++d) stage[threadIdx.x * STRIDE<T> + d] = T(mine[column + d]);
    __syncthreads();
    for (int i = threadIdx.x; i < Shape<T, D>::QUERIES * SLICE; i += Shape<T, D>::THREADS) {
      const int row = i / SLICE, d = i % SLICE;
      if (row < left) to[long(row) * D + column + d] = stage[row * STRIDE<T> + d];
    }
  }
}

template <typename T, int D, bool CAUSAL>
__global__ void __launch_bounds__((Shape<T, D>::THREADS))
attention_forward(Global<const T> q, Global<const T> k, Global<const T> v, Global<T> out,
                  Global<float> lse, int q_len, int k_len, int group_size, float scale) {
  constexpr int QUERIES = Shape<T, D>::QUERIES, KEYS = Shape<T, D>::KEYS;
  constexpr int TILES = 2 * KEYS * D, STAGE = QUERIES * STRIDE<T>;
  SHARED(T, lds, TILES > STAGE ? TILES : STAGE);
  const long head = blockIdx.y, key_head = blockIdx.y / group_size;
  const int first = blockIdx.x * QUERIES;
  const int row = first + threadIdx.x;
  const int rows = q_len - first < QUERIES ? q_len - first : QUERIES;
  auto queries = part(q, (head * q_len + first) * D, long(rows) * D);
  auto keys = part(k, key_head * k_len * D, long(k_len) * D);
  auto values = part(v, key_head * k_len * D, long(k_len) * D);
  auto outputs = part(out, (head * q_len + first) * D, long(rows) * D);
  auto sums = part(lse, head * q_len, q_len);
  // A row past q_len stays for the barriers.

  // exp(x) is exp2(x * log2(e)): the factor goes into the query once.
  const float to_log2 = scale * 1.44269504f;
  float query[D], mean[D];
  read_rows<T, D>(queries, lds, rows, query);
  UNROLL
  for (int d = 0; d < D; ++d) {
    query[d] *= to_log2;
    mean[d] = 0.0f;
  }
  float top = -INF, total = 0.0f;

  auto key_tile = part(lds, 0, KEYS * D);
  auto value_tile = part(lds, KEYS * D, KEYS * D);
  const int seen = CAUSAL && row + 1 < k_len ? row + 1 : k_len;
  const int seen_by_block = CAUSAL && first + rows < k_len ? first + rows : k_len;
  for (int tile = 0; tile < seen_by_block; tile += KEYS) {
    const int end = k_len - tile < KEYS ? k_len - tile : KEYS;
    __syncthreads();
    for (int i = threadIdx.x; i < end * D; i += Shape<T, D>::THREADS) {
      key_tile[i] = keys[long(tile) * D + i];
      value_tile[i] = values[long(tile) * D + i];
    }
    __syncthreads();
    for (int j = 0; j < end && tile + j < seen; ++j) {
      float score = 0.0f;
      UNROLL
      for (int d = 0; d < D; ++d) score += query[d] * float(key_tile[j * D + d]);
      const float higher = fmaxf(top, score);
      const float shrink = exp2f(top - higher);
      const float weight = exp2f(score - higher);
      total = total * shrink + weight;
      UNROLL
      for (int d = 0; d < D; ++d)
        mean[d] = mean[d] * shrink + weight * float(value_tile[j * D + d]);
      top = higher;
    }
  }

  UNROLL
  for (int d = 0; d < D; ++d) mean[d] /= total;
  write_rows<T, D>(outputs, lds, rows, mean);
  if (row < q_len) sums[row] = (top + log2f(total)) * 0.693147181f;
}

ATTENTION_ENTRIES
