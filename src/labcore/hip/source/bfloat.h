// bf16, the upper half of a float, as its bits: clang 15 has no such type for AMD's GPUs.
#pragma once

struct BFloat {
  unsigned short bits;
  BFloat() = default;
  // To the nearest, and of two as near to the even one. A NaN stays one, whatever its payload.
  __host__ __device__ explicit BFloat(float x) {
    unsigned all;
    __builtin_memcpy(&all, &x, sizeof all);
    const unsigned quiet = x != x ? 0x400000 : 0, half = x != x ? 0 : 0x7fff + (all >> 16 & 1);
    bits = ((all | quiet) + half) >> 16;  // two choices and no branch
  }
  __host__ __device__ operator float() const {
    const unsigned all = unsigned(bits) << 16;
    float x;
    __builtin_memcpy(&x, &all, sizeof x);
    return x;
  }
};
