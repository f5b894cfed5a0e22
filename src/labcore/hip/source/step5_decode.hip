// Decode: each sequence has one query against all keys of its cache. Memory should set
// the time.
//
// The query heads that share a key head are the columns of one product, so each key is read once
// for all of them. The product's other columns repeat the last head. A block has a piece of a
// sequence's keys, and a wavefront a tile of the piece. No two wavefronts want the same tile, so
// none passes through LDS. K lies in memory as the first product wants it. V does not: the second
// product wants four keys of one column. But it may take V's columns in any order, so a lane
// reads WIDE neighbors of each of four keys, and product u takes the u-th of each. As soon as
// a tile's keys or values have been used, the next tile's are on their way to the same registers.
// attention_combine weights the pieces by their shares of the sum (flash decoding: Dao, Haziza,
// Massa and Sizov, 2023, https://pytorch.org/blog/flash-decoding).
#include "portable.h"

#if defined(ON_NVIDIA)
#error "steps 3 to 5 are written for AMD's matrix cores; for NVIDIA compile steps 1 and 2"
#endif

template <typename T, int D>
struct Shape {
  static constexpr int TILE = 16;       // rows and columns of a product
  static constexpr int QUERIES = TILE;  // heads of a block
  static constexpr int THREADS = 256;
  static constexpr int WAVES = THREADS / WAVE;
  static constexpr int WIDE = 16 / sizeof(T);  // values of 16 bytes
  static constexpr int ACROSS = D / WIDE;      // lanes that a row of V takes
  // TILE lanes read this many rows of V at once, and a product has the weights of only one of them.
  // With two, half of each product is waste, for which the matrix cores have time.
  static constexpr int PARTS = TILE / ACROSS;
  static constexpr int KEYS = TILE * PARTS;     // of a wavefront's tile
  static constexpr int TURNS = D / (4 * WIDE);  // of the four lanes that share a row of K
};

// c + a b, four values along k from each lane: 16 x 16 times 16 x 16.
__device__ inline Vec<float, 4> multiply(Vec<Half, 4> a, Vec<Half, 4> b, Vec<float, 4> c) {
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
__device__ inline Vec<float, 4> multiply(Vec<BFloat, 4> a, Vec<BFloat, 4> b, Vec<float, 4> c) {
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(raw(a), raw(b), c, 0, 0, 0);
}

// Of 16 bytes, the values that product h takes. Any columns may make up a product, as long as K
// and Q agree on them.
template <int WIDE, typename T>
__device__ inline Vec<T, 4> four(const Vec<T, WIDE>& values, int h) {
  Vec<T, 4> some;
  UNROLL
  for (int e = 0; e < 4; ++e) some[e] = values[4 * h + e];
  return some;
}

// Weights are at most 2^LIFT instead of 1. CDNA2 takes fp16 below 2^-14 for zero, so only
// weights below 2^-29 of the row's largest are lost. The division by `total` takes the factor out
// again. bf16 has enough range without it.
constexpr float LIFT = 15.0f;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// The lane's part of the keys from `tile` on. Four lanes share a key and take 16 bytes in turn.
// Past the end a lane reads the last key again: a wait cannot count loads that a branch may skip.
template <typename T, int D>
__device__ inline void read_keys(Global<const T> keys, int tile, int end,
                                 Vec<T, Shape<T, D>::WIDE> (&key)[Shape<T, D>::PARTS]
                                                                 [Shape<T, D>::TURNS]) {
  constexpr int TILE = Shape<T, D>::TILE, WIDE = Shape<T, D>::WIDE;
  const int column = threadIdx.x % TILE, quarter = threadIdx.x % WAVE / TILE;
  UNROLL
  for (int t = 0; t < Shape<T, D>::PARTS; ++t) {
    const int j = tile + TILE * t + column;
    UNROLL
    for (int s = 0; s < Shape<T, D>::TURNS; ++s)
      key[t][s] = load<WIDE>(keys, long(j < end ? j : end - 1) * D + WIDE * (4 * s + quarter));
  }
  keep_order();  // or the compiler puts the loads off until their tile's turn
}

// And of their values, of four keys each.
template <typename T, int D>
__device__ inline void read_values(Global<const T> values, int tile, int end,
                                   Vec<T, Shape<T, D>::WIDE> (&value)[4]) {
  constexpr int TILE = Shape<T, D>::TILE, WIDE = Shape<T, D>::WIDE, ACROSS = Shape<T, D>::ACROSS;
  const int column = threadIdx.x % TILE, quarter = threadIdx.x % WAVE / TILE;
  UNROLL
  for (int e = 0; e < 4; ++e) {
    const int j = tile + TILE * (column / ACROSS) + 4 * quarter + e;
    value[e] = load<WIDE>(values, long(j < end ? j : end - 1) * D + WIDE * (column % ACROSS));
  }
  keep_order();
}

// The first wavefront combines what all have: weighted sums of V, largest scores, sums of weights.
template <int WAVES, int WIDE>
__device__ inline void add_up(Vec<float, 4> (&mean)[WIDE], float& top, float& total,
                              float to_log2) {
  constexpr int EACH = WIDE * WAVE;  // fours of a wavefront
  SHARED(float, means, (WAVES - 1) * EACH * 4);
  SHARED(float, tops, (WAVES - 1) * WAVE);
  SHARED(float, totals, (WAVES - 1) * WAVE);
  const int wave = threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
  if (wave > 0) {
    UNROLL
    for (int u = 0; u < WIDE; ++u)
      store<4>(means, ((wave - 1) * EACH + u * WAVE + lane) * 4, mean[u]);
    tops[(wave - 1) * WAVE + lane] = top;
    totals[(wave - 1) * WAVE + lane] = total;
  }
  __syncthreads();
  if (wave > 0) return;
  float higher = top;
  for (int w = 0; w < WAVES - 1; ++w) higher = fmaxf(higher, tops[w * WAVE + lane]);
  const float shrink = exp2f((top - higher) * to_log2);
  total *= shrink;
  UNROLL
  for (int u = 0; u < WIDE; ++u) {
    UNROLL
    for (int r = 0; r < 4; ++r) mean[u][r] *= shrink;
  }
  top = higher;
  for (int w = 0; w < WAVES - 1; ++w) {
    const float share = exp2f((tops[w * WAVE + lane] - top) * to_log2);  // 0 if it had no keys
    total += share * totals[w * WAVE + lane];
    UNROLL
    for (int u = 0; u < WIDE; ++u) {
      const Vec<float, 4> theirs = load<4>(means, (w * EACH + u * WAVE + lane) * 4);
      UNROLL
      for (int r = 0; r < 4; ++r) mean[u][r] += share * theirs[r];
    }
  }
}

// Block (x, y, z) has piece x of the keys of key head y, and heads 16 z … 16 z + 15 of its group.
// A piece without keys leaves its part of `out` alone.
template <typename T, int D>
__global__ void __launch_bounds__((Shape<T, D>::THREADS)) WAVES_PER_EU(2)
attention_split(Global<const T> q,            // [B, H, D]
                Global<const T> k,            // [B, Hkv, S, D]
                Global<const T> v,            // [B, Hkv, S, D]
                Global<const int> lengths,    // [B]
                Global<float> out,            // [B, H, pieces, D]
                Global<float> lse,            // [B, H, pieces]
                int key_heads, int k_len, int group_size, float scale) {
  constexpr int TILE = Shape<T, D>::TILE, WIDE = Shape<T, D>::WIDE, ACROSS = Shape<T, D>::ACROSS;
  constexpr int PARTS = Shape<T, D>::PARTS, TURNS = Shape<T, D>::TURNS, KEYS = Shape<T, D>::KEYS;
  constexpr int PASS = Shape<T, D>::WAVES * KEYS;  // keys that the block works on at once
  const int wave = threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
  const int column = lane % TILE, quarter = lane / TILE;
  const int pieces = gridDim.x, piece = blockIdx.x, first = blockIdx.z * TILE;
  const int heads = group_size - first < TILE ? group_size - first : TILE;
  const long key_head = blockIdx.y, head = key_head * group_size + first;
  const int known = lengths[blockIdx.y / key_heads];
  const int length = known < k_len ? known : k_len;
  const int each = ((length + pieces - 1) / pieces + PASS - 1) / PASS * PASS;
  const int begin = piece * each, end = begin + each < length ? begin + each : length;
  auto sums = part(lse, head * pieces, long(heads) * pieces);
  if (begin >= end) {
    if (int(threadIdx.x) < heads) sums[long(threadIdx.x) * pieces + piece] = -INF;
    return;
  }
  auto queries = part(q, head * D, long(heads) * D);
  auto keys = part(k, key_head * k_len * D, long(length) * D);
  auto values = part(v, key_head * k_len * D, long(length) * D);
  auto outputs = part(out, head * pieces * D, long(heads) * pieces * D);

  const int source = column < heads ? column : heads - 1;
  const float to_log2 = scale * LOG2_E;
  Vec<T, WIDE> query[TURNS];
  UNROLL
  for (int s = 0; s < TURNS; ++s)
    query[s] = load<WIDE>(queries, long(source) * D + WIDE * (4 * s + quarter));
  // mean[t][u], value r: column WIDE * (row % ACROSS) + u of V for row = 4 * quarter + r, and of
  // use where row / ACROSS is t.
  Vec<float, 4> mean[PARTS][WIDE] = {};
  float top = -INF, total = 0.0f;  // total: of the keys whose scores this lane gets

  Vec<T, WIDE> key[PARTS][TURNS], value[4];
  read_keys<T, D>(keys, begin + KEYS * wave, end, key);
  read_values<T, D>(values, begin + KEYS * wave, end, value);
  for (int tile = begin + KEYS * wave; tile < end; tile += PASS) {
    Vec<float, 4> score[PARTS] = {};
    float higher = top;
    UNROLL
    for (int t = 0; t < PARTS; ++t) {
      UNROLL
      for (int s = 0; s < TURNS; ++s) {
        UNROLL
        for (int h = 0; h < WIDE / 4; ++h)
          score[t] = multiply(four<WIDE, T>(key[t][s], h), four<WIDE, T>(query[s], h), score[t]);
      }
      UNROLL
      for (int r = 0; r < 4; ++r) {
        score[t][r] = tile + TILE * t + 4 * quarter + r < end ? score[t][r] : -INF;
        higher = fmaxf(higher, score[t][r]);
      }
    }
    read_keys<T, D>(keys, tile + PASS, end, key);
    for (int other = TILE; other < WAVE; other *= 2)
      higher = fmaxf(higher, __shfl_xor(higher, other));
    const float shrink = exp2f((top - higher) * to_log2);
    total *= shrink;
    top = higher;
    UNROLL
    for (int t = 0; t < PARTS; ++t) {
      Vec<T, 4> weight;
      UNROLL
      for (int r = 0; r < 4; ++r) {
        const float unrounded = exp2f((score[t][r] - top) * to_log2 + LIFT);
        total += unrounded;
        weight[r] = T(unrounded);
      }
      UNROLL
      for (int u = 0; u < WIDE; ++u) {
        Vec<T, 4> turned;
        UNROLL
        for (int e = 0; e < 4; ++e) {
          turned[e] = value[e][u];
          mean[t][u][e] *= shrink;
        }
        mean[t][u] = multiply(turned, weight, mean[t][u]);
      }
    }
    read_values<T, D>(values, tile + PASS, end, value);
  }
  for (int other = TILE; other < WAVE; other *= 2) total += __shfl_xor(total, other);

  const bool lower = 4 * quarter < ACROSS;
  Vec<float, 4> mine[WIDE];  // the useful part of `mean`
  UNROLL
  for (int u = 0; u < WIDE; ++u) {
    UNROLL
    for (int r = 0; r < 4; ++r) mine[u][r] = lower ? mean[0][u][r] : mean[PARTS - 1][u][r];
  }
  add_up<Shape<T, D>::WAVES, WIDE>(mine, top, total, to_log2);
  if (wave > 0) return;
  const float share = 1.0f / total;
  UNROLL
  for (int r = 0; r < 4; ++r) {
    UNROLL
    for (int h = 0; h < WIDE / 4; ++h) {
      Vec<float, 4> some;
      UNROLL
      for (int e = 0; e < 4; ++e) {
        some[e] = mine[4 * h + e][r] * share;
        if (PARTS == 2) some[e] += __shfl_xor(some[e], WAVE / 2);
      }
      if (column < heads && lower)
        store<4>(outputs,
                 (long(column) * pieces + piece) * D + WIDE * (4 * quarter + r) + 4 * h, some);
    }
  }
  if (column < heads && quarter == 0)
    sums[long(column) * pieces + piece] = top * scale + (log2f(total) - LIFT) * LN_2;
}

// One wavefront, one head: its pieces, weighted by exp(piece's lse - the largest).
template <typename T, int D>
__global__ void __launch_bounds__(WAVE)
attention_combine(Global<const float> piece_out,  // [B, H, pieces, D]
                  Global<const float> piece_lse,  // [B, H, pieces]
                  Global<T> out,                  // [B, H, D]
                  Global<float> lse,              // [B, H]
                  int pieces) {
  constexpr int ACROSS = D / 4;  // lanes that a piece's row takes
  const long head = blockIdx.x;
  const int lane = threadIdx.x, column = 4 * (lane % ACROSS);
  auto rows = part(piece_out, head * pieces * D, long(pieces) * D);
  auto sums = part(piece_lse, head * pieces, pieces);
  float top = -INF;
  for (int p = lane; p < pieces; p += WAVE) top = fmaxf(top, sums[p]);
  for (int other = 1; other < WAVE; other *= 2) top = fmaxf(top, __shfl_xor(top, other));

  float total = 0.0f, mean[4] = {};
  for (int p = lane / ACROSS; p < pieces; p += WAVE / ACROSS) {
    const float sum = sums[p];
    if (sum == -INF) continue;  // a piece without keys: its row was not written
    const float weight = exp2f((sum - top) * LOG2_E);
    const Vec<float, 4> row = load<4>(rows, long(p) * D + column);
    total += weight;
    UNROLL
    for (int e = 0; e < 4; ++e) mean[e] += weight * row[e];
  }
  Vec<T, 4> result;
  for (int other = ACROSS; other < WAVE; other *= 2) total += __shfl_xor(total, other);
  UNROLL
  for (int e = 0; e < 4; ++e) {
    for (int other = ACROSS; other < WAVE; other *= 2) mean[e] += __shfl_xor(mean[e], other);
    result[e] = T(total > 0.0f ? mean[e] / total : 0.0f);
  }
  if (lane < ACROSS) store<4>(out, head * D + column, result);
  if (lane == 0) lse[head] = total > 0.0f ? top + log2f(total) * LN_2 : -INF;
}

#define DECODE_FORMS(name, T)                                    \
  ENTRY(attention_split_##name##_d64, attention_split<T, 64>)     \
  ENTRY(attention_split_##name##_d128, attention_split<T, 128>)   \
  ENTRY(attention_combine_##name##_d64, attention_combine<T, 64>) \
  ENTRY(attention_combine_##name##_d128, attention_combine<T, 128>)
DECODE_FORMS(f16, Half)
DECODE_FORMS(bf16, BFloat)
BLOCK_SHAPE
