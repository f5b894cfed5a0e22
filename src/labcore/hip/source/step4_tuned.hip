// The same on the machine's terms: changes to step 3, most seen by a counter or in a report.
//
// Reads are of 16 bytes a lane, and V is turned over on its way into LDS, so that a lane finds its
// four keys side by side: one read instead of four. All shapes use 32x32x8, where a read of LDS
// serves 32 queries. The next tile is on its way while this one is worked on. Blocks are numbered
// so that those of one head share an XCD and its L2, the longest rows of a causal head first.
// And WAVES_PER_EU(2) keeps the registers at 256: two wavefronts share a SIMD, and as no
// accumulation registers are left over, results need no moves between those and the others.
#include "portable.h"

#if defined(ON_NVIDIA)
#error "steps 3 and 4 are written for AMD's matrix cores; for NVIDIA compile steps 1 and 2"
#endif

template <typename T, int D>
struct Shape {
  static constexpr int TILE = 32;  // rows of a wavefront
  // LDS has no room for two blocks of 128 columns in fp32: one block has all the wavefronts.
  static constexpr int THREADS = sizeof(T) == 4 && D == 128 ? 512 : 256;
  static constexpr int QUERIES = THREADS / WAVE * TILE;             // rows of a block
  static constexpr int KEYS = sizeof(T) == 2 && D == 64 ? 64 : 32;  // of a tile
  static constexpr int WIDE = 16 / sizeof(T);                       // values of 16 bytes
  static constexpr int KEY_STRIDE = D + WIDE;    // of a key in LDS
  static constexpr int VALUE_STRIDE = KEYS + 4;  // of a column of V in LDS
};

// c + a b, four values along k from each lane: 32 x 8 times 8 x 32.
__device__ inline Vec<float, 16> multiply(Vec<Half, 4> a, Vec<Half, 4> b, Vec<float, 16> c) {
  return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}
__device__ inline Vec<float, 16> multiply(Vec<BFloat, 4> a, Vec<BFloat, 4> b, Vec<float, 16> c) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(raw(a), raw(b), c, 0, 0, 0);
}
// An fp32 instruction takes one value from each lane. The terms of a sum over k may come in any
// order, so four instructions make the same product of the same four values.
__device__ inline Vec<float, 16> multiply(Vec<float, 4> a, Vec<float, 4> b, Vec<float, 16> c) {
  UNROLL
  for (int i = 0; i < 4; ++i) c = __builtin_amdgcn_mfma_f32_32x32x2f32(a[i], b[i], c, 0, 0, 0);
  return c;
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

// Weights are at most 2^LIFT instead of 1. CDNA2 takes fp16 below 2^-14 for zero: so it loses
// weights below 2^-29 of the row's largest. The division by `total` takes the factor out again.
// bf16 and fp32 have the room, and would not need it.
constexpr float LIFT = 15.0f;

// Blocks are dealt out to the XCDs in turn: those of XCD x are x, x + 8, x + 16 … Counted one XCD
// after the other, each has a run of neighbours, and so whole heads but for a run's two ends.
__device__ inline unsigned place_of_block(unsigned block, unsigned blocks) {
  constexpr unsigned XCDS = 8;  // of gfx942; with one XCD this is some order like any other
  const unsigned xcd = block % XCDS, turn = block / XCDS;
  const unsigned each = blocks / XCDS, longer = blocks % XCDS;  // runs, and how many have one more
  return xcd * each + (xcd < longer ? xcd : longer) + turn;
}

// WIDE columns, from d on, of the keys j … j + 3; zeros past the last key.
template <int D, typename T, int WIDE>
__device__ inline void read_piece(Global<const T> from, int j, int d, int k_len,
                                  Vec<T, WIDE> (&piece)[4]) {
  UNROLL
  for (int e = 0; e < 4; ++e)
    piece[e] = j + e < k_len ? load<WIDE>(from, long(j + e) * D + d) : Vec<T, WIDE>{};
}

template <typename T, int D, bool CAUSAL>
__global__ void __launch_bounds__((Shape<T, D>::THREADS)) WAVES_PER_EU(2)
attention_forward(Global<const T> q, Global<const T> k, Global<const T> v, Global<T> out,
                  Global<float> lse, int q_len, int k_len, int group_size, float scale) {
  constexpr int QUERIES = Shape<T, D>::QUERIES, KEYS = Shape<T, D>::KEYS;
  constexpr int TILE = Shape<T, D>::TILE, WIDE = Shape<T, D>::WIDE;
  constexpr int KEY_STRIDE = Shape<T, D>::KEY_STRIDE, VALUE_STRIDE = Shape<T, D>::VALUE_STRIDE;
  constexpr int GROUPS = WAVE / TILE;     // lanes that share a query
  constexpr int DEPTH = 4 * GROUPS;       // of one product
  constexpr int RESULTS = TILE / GROUPS;  // values of its result in a lane
  SHARED(T, key_tile, KEYS * KEY_STRIDE);
  SHARED(T, value_tile, D * VALUE_STRIDE);
  const int lane = threadIdx.x % WAVE, column = lane % TILE, group = lane / TILE;
  const unsigned place =
      place_of_block(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
  const long head = place / gridDim.x, key_head = place / gridDim.x / group_size;
  const int block = place % gridDim.x;
  const int first = (CAUSAL ? gridDim.x - 1 - block : block) * QUERIES;
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
  Vec<T, WIDE> query[D / (GROUPS * WIDE)];
  Vec<float, RESULTS> mean[D / TILE] = {};
  UNROLL
  for (int s = 0; s < D / (GROUPS * WIDE); ++s)
    query[s] = load<WIDE>(queries, long(source) * D + WIDE * (GROUPS * s + group));
  float top = -INF, total = 0.0f;  // total: of the keys whose scores this lane gets

  // Each thread brings one piece of a tile: the first half of the block K's, the other half V's.
  constexpr int ACROSS = D / WIDE, DOWN = KEYS / 4, PIECES = ACROSS * DOWN;
  static_assert(2 * PIECES == Shape<T, D>::THREADS);
  const bool is_key = threadIdx.x < PIECES;
  const int number = threadIdx.x % PIECES;
  const int piece_j = 4 * (is_key ? number / ACROSS : number % DOWN);
  const int piece_d = WIDE * (is_key ? number % ACROSS : number / DOWN);
  const Global<const T> from = is_key ? keys : values;
  Vec<T, WIDE> piece[4];
  read_piece<D, T, WIDE>(from, piece_j, piece_d, k_len, piece);

  const int seen_by_block = CAUSAL && first + rows < k_len ? first + rows : k_len;
  for (int tile = 0; tile < seen_by_block; tile += KEYS) {
    const int end = k_len - tile < KEYS ? k_len - tile : KEYS;
    __syncthreads();
    if (is_key) {
      UNROLL
      for (int e = 0; e < 4; ++e)
        store<WIDE>(key_tile, (piece_j + e) * KEY_STRIDE + piece_d, piece[e]);
    } else {
      UNROLL
      for (int c = 0; c < WIDE; ++c) {
        Vec<T, 4> turned;
        UNROLL
        for (int e = 0; e < 4; ++e) turned[e] = piece[e][c];
        store<4>(value_tile, (piece_d + c) * VALUE_STRIDE + piece_j, turned);
      }
    }
    __syncthreads();
    read_piece<D, T, WIDE>(from, tile + KEYS + piece_j, piece_d, k_len, piece);

    // Value r of a lane is the score of key DEPTH * (r / 4) + 4 * group + r % 4 of TILE.
    Vec<float, RESULTS> score[KEYS / TILE] = {};
    float higher = top;
    UNROLL
    for (int t = 0; t < KEYS / TILE; ++t) {
      UNROLL
      for (int s = 0; s < D / (GROUPS * WIDE); ++s) {
        const int at = (TILE * t + column) * KEY_STRIDE + WIDE * (GROUPS * s + group);
        const Vec<T, WIDE> key = load<WIDE>(key_tile, at);
        UNROLL
        for (int h = 0; h < WIDE / 4; ++h)
          score[t] = multiply(four<WIDE, T>(key, h), four<WIDE, T>(query[s], h), score[t]);
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
        Vec<T, 4> weight;
        UNROLL
        for (int e = 0; e < 4; ++e) {
          const float unrounded = exp2f((score[t][4 * s + e] - top) * to_log2 + LIFT);
          total += unrounded;
          weight[e] = T(unrounded);
        }
        const int j = TILE * t + DEPTH * s + 4 * group;
        UNROLL
        for (int u = 0; u < D / TILE; ++u)
          mean[u] = multiply(load<4>(value_tile, (TILE * u + column) * VALUE_STRIDE + j), weight,
                             mean[u]);
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
