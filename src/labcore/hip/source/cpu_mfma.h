// The matrix instructions of CDNA on a CPU, under the compiler builtins' own names.
//
// All 64 lanes of a wavefront hand over their part of A and B, and each works out the elements of
// D = A B + C that the hardware leaves with it. Which lane holds which element is written down a
// second time in labcore.hip.mfma; tests hold both to AMD's matrix instruction calculator.
//
// Arithmetic. fp16 and bf16 follow CDNA2 (gfx90a): products are exact in fp32, four neighbours along k are
// summed in pairs, and the sums are added to C in the order of k, each addition rounded; subnormal
// inputs, products and sums count as zero. fp32 is one fused multiply-add after the other.
// CDNA3 (gfx942) is not followed bit by bit: it sums eight products at once, cuts off what falls
// below its accumulator and keeps subnormals. A NaN's payload and the sign of a zero may differ.
// Sources: AMD's "MI200 MFMA behavior specifics" (MIOpen documentation) for what becomes zero;
// Xie et al., "MMA-Sim" (arXiv 2511.10909) for the order of the sums.
#pragma once

#if WAVE_LANES == 64  // there is no matrix instruction of 32 lanes

namespace cpu {

constexpr float NORMAL = 0x1p-126f, HALF_NORMAL = 0x1p-14f;  // the least normal values

inline float or_zero(float x, float normal = NORMAL) { return std::fabs(x) < normal ? 0.0f : x; }

inline float operand(Half x) { return or_zero(x, HALF_NORMAL); }
inline float operand(short bits) {  // of bf16
  BFloat x;
  x.bits = bits;
  return or_zero(x);
}

// c plus the products of the values that one lane holds of a row of A and of a column of B.
template <typename T, int N>
float add_products(const Vec<T, N>& a, const Vec<T, N>& b, float c) {
  static_assert(N == 4, "the 16-bit instructions take four values a lane");
  float p[N];
  for (int i = 0; i < N; ++i) p[i] = or_zero(operand(a[i]) * operand(b[i]));
  return or_zero(or_zero(c) + or_zero(or_zero(p[0] + p[1]) + or_zero(p[2] + p[3])));
}
template <int N>
float add_products(const Vec<float, N>& a, const Vec<float, N>& b, float c) {
  static_assert(N == 1, "the fp32 instructions take one value a lane");
  return std::fmaf(a[0], b[0], c);
}

// M: rows of A and D, columns of B and D. N: values of A and of B that a lane holds.
template <int M, typename T, int N>
Vec<float, M * M / 64> mfma(const Vec<T, N>& a, const Vec<T, N>& b, Vec<float, M * M / 64> c,
                            const char* what, int line) {
  constexpr int GROUPS = 64 / M;  // lanes that share a row of A, a column of B
  struct Operands {
    Vec<T, N> a, b;
  } mine{a, b};
  const unsigned char* deposits = meet(&mine, sizeof mine, what, line);
  for (int i = 0; i < 64; ++i)
    if (!active(i))
      fail("%s of line %d needs all 64 lanes, and lane %d takes no part", what, line, i);
  const auto* all = reinterpret_cast<const Operands*>(deposits);
  const int column = lane() % M, group = lane() / M;
  for (int r = 0; r < M * M / 64; ++r) {
    const int row = 4 * GROUPS * (r / 4) + 4 * group + r % 4;
    for (int g = 0; g < GROUPS; ++g)
      c[r] = add_products(all[g * M + row].a, all[g * M + column].b, c[r]);
  }
  if (lane() == 0) ++machine.report->mfma;
  return c;
}

}  // namespace cpu

// The last three arguments shuffle blocks of A and B; one block has nothing to shuffle.
#define MFMA(SHAPE, M, T, N)                                                               \
  inline Vec<float, M * M / 64> __builtin_amdgcn_mfma_f32_##SHAPE(                         \
      const Vec<T, N>& a, const Vec<T, N>& b, const Vec<float, M * M / 64>& c, int, int, int, \
      int line = __builtin_LINE()) {                                                       \
    return cpu::mfma<M>(a, b, c, "mfma_f32_" #SHAPE, line);                                \
  }
MFMA(32x32x8f16, 32, Half, 4)
MFMA(16x16x16f16, 16, Half, 4)
MFMA(32x32x8bf16_1k, 32, short, 4)
MFMA(16x16x16bf16_1k, 16, short, 4)
#undef MFMA

// The fp32 instructions take a bare float a lane.
#define MFMA(SHAPE, M)                                                                     \
  inline Vec<float, M * M / 64> __builtin_amdgcn_mfma_f32_##SHAPE(                         \
      float a, float b, const Vec<float, M * M / 64>& c, int, int, int,                    \
      int line = __builtin_LINE()) {                                                       \
    return cpu::mfma<M>(Vec<float, 1>{a}, Vec<float, 1>{b}, c, "mfma_f32_" #SHAPE, line);  \
  }
MFMA(32x32x2f32, 32)
MFMA(16x16x4f32, 16)
#undef MFMA

#endif  // 64 lanes
