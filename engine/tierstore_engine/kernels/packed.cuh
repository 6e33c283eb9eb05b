// The formats of quantised weights: eight numbers of a row at a time, bit for bit like weight_formats.py.
#pragma once
#include "codes.cuh"

template <>
struct Numbers<float> {
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
};

// Bytes are read one by one: blocks begin at any even address.
__device__ __forceinline__ unsigned bits16(const unsigned char* from) { return from[0] | from[1] << 8; }

__device__ __forceinline__ float half_at(const unsigned char* from) {
  const unsigned short bits = bits16(from);
  return __half2float(*reinterpret_cast<const __half*>(&bits));
}

// A format has `eight`: the numbers from `column` (a multiple of 8) on. Only the first `left` of them exist.

template <class DECODE, int BYTES>
struct Plain {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int left) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      numbers[i] = i < left ? DECODE::of(row + (column + i) * static_cast<long long>(BYTES)) : 0.f;
  }
};

struct Float {
  static __device__ __forceinline__ float of(const unsigned char* from) {
    return __int_as_float(bits16(from) | bits16(from + 2) << 16);
  }
};

struct Half {
  static __device__ __forceinline__ float of(const unsigned char* from) { return half_at(from); }
};

struct BFloat {
  static __device__ __forceinline__ float of(const unsigned char* from) { return __int_as_float(bits16(from) << 16); }
};

struct FiniteFloat8 {  // E4M3's only special code
  static __device__ __forceinline__ float of(const unsigned char* from) {
    return (*from & 0x7f) == 0x7f ? __int_as_float(0x7fc00000) : E4M3::decode(*from);
  }
};

struct WideFloat8 {
  static __device__ __forceinline__ float of(const unsigned char* from) { return E5M2::decode(*from); }
};

struct SignedByte {
  static __device__ __forceinline__ float of(const unsigned char* from) { return static_cast<signed char>(*from); }
};

struct UnsignedByte {
  static __device__ __forceinline__ float of(const unsigned char* from) { return *from; }
};

// The lower half of each byte before its upper half. FP4: a sign, two bits of exponent and one of mantissa.
template <bool FP4>
struct Nibbles {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int left) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int code = i < left ? row[(column + i) / 2] >> (i % 2 * 4) & 15 : 0;
      const unsigned short bits = (code & 8) << 12 | (code & 7) << 9;  // of a half that is too small by 2^14
      numbers[i] = FP4 ? __half2float(*reinterpret_cast<const __half*>(&bits)) * 16384.f : code;
    }
  }
};

// Blocks of 32: a scale, a minimum or none, fifth bits or none, the lower halves of 16 bytes and then the upper ones.
template <bool MINIMUM, bool FIFTH, int ZERO>
struct Blocks32 {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int) {
    constexpr int FIFTHS = MINIMUM ? 4 : 2, CODES = FIFTHS + (FIFTH ? 4 : 0);
    const unsigned char* const block = row + column / 32 * static_cast<long long>(CODES + 16);
    const int part = column % 32;
    const float scale = half_at(block), least = MINIMUM ? half_at(block + 2) : 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int code = block[CODES + part % 16 + i] >> (part / 16 * 4) & 15;
      if (FIFTH) code |= (block[FIFTHS + part / 8] >> i & 1) << 4;
      numbers[i] = static_cast<float>(code - ZERO) * scale;
      if (MINIMUM) numbers[i] += least;
    }
  }
};

struct Q8_0 {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int) {
    const unsigned char* const block = row + column / 32 * 34LL;
    const float scale = half_at(block);
#pragma unroll
    for (int i = 0; i < 8; i++) numbers[i] = static_cast<signed char>(block[2 + column % 32 + i]) * scale;
  }
};

// Blocks of 8 × 32 with a scale and a minimum of 6 bits for each 32.
template <bool FIFTH>
struct BlocksK {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int) {
    constexpr int CODES = FIFTH ? 48 : 16;
    const unsigned char* const block = row + column / 256 * static_cast<long long>(CODES + 128);
    const unsigned char* const six = block + 4;
    const int part = column % 256 / 32, place = column % 32, i4 = part % 4;
    const int scale = part < 4 ? six[i4] & 63 : (six[8 + i4] & 15) | six[i4] >> 6 << 4;
    const int least = part < 4 ? six[4 + i4] & 63 : six[8 + i4] >> 4 | six[4 + i4] >> 6 << 4;
    const float by = scale * half_at(block), below = least * half_at(block + 2);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int code = block[CODES + part / 2 * 32 + place + i] >> (part % 2 * 4) & 15;
      if (FIFTH) code |= (block[16 + place + i] >> part & 1) << 4;
      numbers[i] = code * by - below;
    }
  }
};

// Blocks of 16 × 16 with a scale for each 16: halves of bytes, and two more bits.
struct Q6_K {
  static __device__ __forceinline__ void eight(float (&numbers)[8], const unsigned char* row, int column, int) {
    const unsigned char* const block = row + column / 256 * 210LL;
    const int in = column % 256, side = in / 128, place = in % 128;
    const float by = static_cast<signed char>(block[192 + in / 16]) * half_at(block + 208);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int lower = block[side * 64 + place % 64 + i] >> (place / 64 * 4) & 15;
      const int upper = block[128 + side * 32 + place % 32 + i] >> (place / 32 * 2) & 3;
      numbers[i] = static_cast<float>((lower | upper << 4) - 32) * by;
    }
  }
};

// The numbers of decode.c for dtypes.
enum { FLOAT32, BFLOAT16, INT8, FLOAT16, UINT8, INT16 };

__device__ __forceinline__ float table_number(const unsigned char* table, long long at, int kind) {
  if (kind == FLOAT32) return Float::of(table + 4 * at);
  if (kind == BFLOAT16) return BFloat::of(table + 2 * at);
  if (kind == FLOAT16) return half_at(table + 2 * at);
  if (kind == INT8) return static_cast<signed char>(table[at]);
  if (kind == UINT8) return table[at];
  return static_cast<short>(bits16(table + 2 * at));
}

// Scales and zeros `[row blocks, width]` beside the codes; null without. `groups` are those of the columns, null if a
// group is `group` neighbours.
struct Tables {
  const unsigned char *scales, *zeros;
  const long long* groups;
  int width, group, block_rows, scale_kind, zero_kind;
  float zero;

  __device__ __forceinline__ void apply(float (&numbers)[8], long long row, int column, int left) const {
    if (scales == nullptr) return;
    const long long first = row / block_rows * width;
    float by = 0.f, least = zero;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i >= left) continue;
      if (i == 0 || groups != nullptr || group % 8 != 0) {  // else eight columns are of one group
        const long long at = first + (groups != nullptr ? groups[column + i] : (column + i) / group);
        by = table_number(scales, at, scale_kind);
        least = zeros != nullptr ? table_number(zeros, at, zero_kind) : zero;
      }
      numbers[i] = (numbers[i] - least) * by;
    }
  }
};
