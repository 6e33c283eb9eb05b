// Codes of 8 and 4 bits for numbers, bit for bit like kv_format.py, except for NaN.
#pragma once
#include "numbers.cuh"

// A code of 8 bits with `MANTISSA` bits of mantissa; the sign is above the exponent.
template <int MANTISSA, int BIAS>
struct Float8 {
  static constexpr int BITS = 8;

  static __device__ __forceinline__ unsigned encode(float x) {
    const int bits = __float_as_int(x), magnitude = bits & 0x7fffffff, sign = (bits >> 24) & 0x80;
    constexpr int SHIFT = 23 - MANTISSA, LEAST_NORMAL = (128 - BIAS) << 23;
    if (magnitude < LEAST_NORMAL)
      return sign | static_cast<int>(rintf(__int_as_float(magnitude) * (1 << (BIAS - 1 + MANTISSA))));
    const int rounded = magnitude + (1 << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1);
    return sign | ((rounded >> SHIFT) - ((127 - BIAS) << MANTISSA));
  }

  // Through a half, whose exponent is at least as wide.
  static __device__ __forceinline__ float decode(unsigned code) {
    const unsigned short bits = (code & 0x80) << 8 | (code & 0x7f) << (10 - MANTISSA);
    return __half2float(*reinterpret_cast<const __half*>(&bits)) * (1 << (15 - BIAS));
  }
};

struct E4M3 : Float8<3, 7> {
  static constexpr float LARGEST = 448.f;
};

struct E5M2 : Float8<2, 15> {
  static constexpr float LARGEST = 57344.f;
};

struct Int8 {
  static constexpr int BITS = 8;
  static constexpr float LARGEST = 127.f;
  static __device__ __forceinline__ unsigned encode(float x) { return static_cast<int>(rintf(x)) & 0xff; }
  static __device__ __forceinline__ float decode(unsigned code) { return static_cast<signed char>(code); }
};

struct Int4 {
  static constexpr int BITS = 4;
  static constexpr float LARGEST = 7.f;
  static __device__ __forceinline__ unsigned encode(float x) { return static_cast<int>(rintf(x)) + 8; }
  static __device__ __forceinline__ float decode(unsigned code) { return static_cast<int>(code) - 8; }
};

// Eight numbers of a vector, under its scale.
template <class CODE>
__device__ __forceinline__ void decode8(float (&numbers)[8], const unsigned char* codes, float scale) {
  unsigned words[CODE::BITS / 4];
  if constexpr (CODE::BITS == 8) {
    const uint2 both = *reinterpret_cast<const uint2*>(codes);
    words[0] = both.x;
    words[1] = both.y;
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(codes);
  }
  constexpr int IN_WORD = 32 / CODE::BITS;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const unsigned code = words[i / IN_WORD] >> (i % IN_WORD * CODE::BITS) & ((1 << CODE::BITS) - 1);
    numbers[i] = CODE::decode(code) * scale;
  }
}

template <class CODE>
__device__ __forceinline__ void encode8(unsigned char* codes, const float (&numbers)[8], float scale) {
  unsigned words[CODE::BITS / 4] = {};
  constexpr int IN_WORD = 32 / CODE::BITS;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float scaled = fminf(fmaxf(numbers[i] / scale, -CODE::LARGEST), CODE::LARGEST);
    words[i / IN_WORD] |= CODE::encode(scaled) << (i % IN_WORD * CODE::BITS);
  }
  if constexpr (CODE::BITS == 8)
    *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
  else
    *reinterpret_cast<unsigned*>(codes) = words[0];
}
