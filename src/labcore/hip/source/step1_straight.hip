// The straight port: one thread owns one row of queries and walks over all keys that it sees.
//
// Nothing is shared, so nothing can go wrong between threads; but each wave reads all of K and V
// from global memory, one element an access as it is written, for its lanes all want the same one.
#include "portable.h"

template <typename T, int D>
struct Shape {
  static constexpr int QUERIES = 128;  // rows of a block
  static constexpr int THREADS = 128;
};

template <typename T, int D, bool CAUSAL>
__global__ void __launch_bounds__((Shape<T, D>::THREADS))
attention_forward(Global<const T> q, Global<const T> k, Global<const T> v, Global<T> out,
                  Global<float> lse, int q_len, int k_len, int group_size, float scale) {
  const long head = blockIdx.y, key_head = blockIdx.y / group_size;
  const int first = blockIdx.x * Shape<T, D>::QUERIES;
  const int row = first + threadIdx.x;
  auto queries = part(q, head * q_len * D, long(q_len) * D);
  auto keys = part(k, key_head * k_len * D, long(k_len) * D);
  auto values = part(v, key_head * k_len * D, long(k_len) * D);
  auto outputs = part(out, head * q_len * D, long(q_len) * D);
  auto sums = part(lse, head * q_len, q_len);
  if (row >= q_len) return;

  // exp(x) is exp2(x * log2(e)): the factor goes into the query once.
  const float to_log2 = scale * 1.44269504f;
  float query[D], mean[D];
  UNROLL
  for (int d = 0; d < D; ++d) {
    query[d] = float(queries[long(row) * D + d]) * to_log2;
    mean[d] = 0.0f;
  }
  float top = -INF, total = 0.0f;

  const int seen = CAUSAL && row + 1 < k_len ? row + 1 : k_len;
  for (int j = 0; j < seen; ++j) {
    float score = 0.0f;
    UNROLL
    for (int d = 0; d < D; ++d) score += query[d] * float(keys[long(j) * D + d]);
    const float higher = fmaxf(top, score);
    const float shrink = exp2f(top - higher);
    const float weight = exp2f(score - higher);
    total = total * shrink + weight;
    UNROLL
    for (int d = 0; d < D; ++d)
      mean[d] = mean[d] * shrink + weight * float(values[long(j) * D + d]);
    top = higher;
  }

  UNROLL
  for (int d = 0; d < D; ++d) outputs[long(row) * D + d] = T(mean[d] / total);
  sums[row] = (top + log2f(total)) * 0.693147181f;
}

ATTENTION_ENTRIES
