// Quantise keys and values of new tokens and write them to their pages, bit for bit like quantise() in kv_format.py.
//
// grid (tokens), any block of whole warps. A warp takes a vector, a lane 8 of its numbers. A token without a page
// (-1) is skipped.
#include <ptx.cuh>

#include "codes.cuh"
#include "paged.cuh"

// Quantise `vector` to `codes`, under a static scale, or (null) under its own scale, which is written to `scale`.
template <class T, int HEAD_DIM, class CODE>
__device__ __forceinline__ void write_vector(const T* vector, unsigned char* codes, __nv_bfloat16* scale,
                                             const float* static_scale) {
  const int lane = threadIdx.x % 32;
  const bool mine = lane < HEAD_DIM / 8;
  float numbers[8] = {};
  if (mine) widen8<T>(numbers, *reinterpret_cast<const uint4*>(vector + lane * 8));
  float chosen;
  if (static_scale != nullptr) {
    chosen = *static_scale;
  } else {
    int largest = 0;  // magnitudes are ordered like their bits, and NaN is above all
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_int(numbers[i]) & 0x7fffffff);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    const float exact = __int_as_float(largest) / CODE::LARGEST;
    // Round up to a bfloat16 that is not subnormal. A NaN stays a NaN.
    const int up = max((__float_as_int(exact) + 0xffff) & static_cast<int>(0xffff0000u), 1 << 23);
    chosen = __int_as_float(exact == exact ? up : 0x7fc00000);
    if (lane == 0) *scale = __float2bfloat16_rn(chosen);
  }
  if (mine) encode8<CODE>(codes + lane * CODE::BITS, numbers, chosen);
}

template <class T, int HEAD_DIM, int PAGE, class KV>
__global__ void __launch_bounds__(256)
    quantise_write(const T* __restrict__ keys, const T* __restrict__ values,
                   long long key_stride, long long value_stride,  // distance of tokens, in numbers
                   const int* __restrict__ token_pages, const int* __restrict__ token_offsets,  // [tokens]
                   unsigned char* __restrict__ pool, long long page_stride, long long layer_offset,
                   const float* __restrict__ static_scales, int kv_heads) {
  const long long token = blockIdx.x;
  const int page = token_pages[token], offset = token_offsets[token];
  if (page < 0) return;
  const CodePlanes<HEAD_DIM, PAGE, KV> planes(pool + page * page_stride + layer_offset, kv_heads);
  for (int i = threadIdx.x / 32; i < 2 * kv_heads; i += blockDim.x / 32) {
    const int head = i % kv_heads;
    const float* const fixed = static_scales == nullptr ? nullptr : static_scales + i;
    if (i < kv_heads)
      write_vector<T, HEAD_DIM, typename KV::Key>(keys + token * key_stride + head * HEAD_DIM,
                                                  planes.key(head, offset), planes.scale(0, head, offset), fixed);
    else
      write_vector<T, HEAD_DIM, typename KV::Value>(values + token * value_stride + head * HEAD_DIM,
                                                    planes.value(head, offset), planes.scale(1, head, offset),
                                                    fixed);
  }
}
