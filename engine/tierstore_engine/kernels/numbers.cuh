// Both 16-bit number formats under one name, and constants, because NVRTC has no <math.h>.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Conversions of T = __half or __nv_bfloat16. A `pair` is two of them in one 32-bit register, the first in
// the low half, as mma operands and 16-byte loads hold them.
template <class T>
struct Numbers;

template <>
struct Numbers<__half> {
  static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ float2 widen_pair(unsigned pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ __forceinline__ unsigned narrow_pair(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
};

template <>
struct Numbers<__nv_bfloat16> {
  static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ float2 widen_pair(unsigned pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
  static __device__ __forceinline__ unsigned narrow_pair(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
};

// Eight numbers (16 bytes) widened.
template <class T>
__device__ __forceinline__ void widen8(float (&wide)[8], const uint4& bits) {
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = Numbers<T>::widen_pair(pairs[i]);
    wide[2 * i] = pair.x;
    wide[2 * i + 1] = pair.y;
  }
}

// Eight floats rounded to T.
template <class T>
__device__ __forceinline__ uint4 narrow8(const float (&wide)[8]) {
  return make_uint4(Numbers<T>::narrow_pair(wide[0], wide[1]), Numbers<T>::narrow_pair(wide[2], wide[3]),
                    Numbers<T>::narrow_pair(wide[4], wide[5]), Numbers<T>::narrow_pair(wide[6], wide[7]));
}
