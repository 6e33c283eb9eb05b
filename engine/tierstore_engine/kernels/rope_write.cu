// From the projections of new tokens to their pages: rotate queries and keys, and write keys and values into pages.
//
// The rounding is that of the plain formula in T, x * cos + rotated(x) * sin with every step rounded. So the pages
// are bit for bit those of an unfused implementation, on any device.
//
// grid (tokens), any block of whole warps. Each thread takes 8 dimensions and the 8 that they pair with. A token
// without a page (-1) is skipped. Four blocks on an SM are enough: without that limit the compiler spills to fit six.
#include <ptx.cuh>

#include "numbers.cuh"

// Rotate one vector of a head. `mine` are 8 of its dimensions, `other` the dimensions that they pair with, with their
// sign in the rotation.
template <class T>
__device__ __forceinline__ uint4 rotate8(const float (&mine)[8], const float (&other)[8], float sign,
                                         const float (&cos)[8], const float (&sin)[8]) {
  float turned[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const T a = Numbers<T>::narrow(mine[i] * cos[i]), b = Numbers<T>::narrow(sign * other[i] * sin[i]);
    turned[i] = Numbers<T>::widen(a) + Numbers<T>::widen(b);
  }
  return narrow8<T>(turned);
}

// ROTATE false: keys are written unchanged, and queries, cos and sin are not read. Latents are keys without values
// (null).
template <class T, int HEAD_DIM, int PAGE, bool ROTATE>
__global__ void __launch_bounds__(256, 4)
    rope_write(const T* __restrict__ queries, const T* __restrict__ keys, const T* __restrict__ values,
               long long query_stride, long long key_stride, long long value_stride,  // distance of tokens, in numbers
               const T* __restrict__ cosines, const T* __restrict__ sines,            // [tokens, HEAD_DIM]
               const int* __restrict__ token_pages, const int* __restrict__ token_offsets,  // [tokens]
               T* __restrict__ rotated,                                               // [tokens, heads, HEAD_DIM]
               T* __restrict__ pool, long long page_stride, long long layer_offset, int heads, int kv_heads) {
  constexpr int VECTORS = HEAD_DIM / 8;  // of 16 bytes
  constexpr int HALF = HEAD_DIM / 16;    // vectors of half a head; a head of 16 dimensions has one
  const long long token = blockIdx.x;
  auto vector = [](const T* row, int head, int index) {
    return *reinterpret_cast<const uint4*>(row + head * HEAD_DIM + index * 8);
  };
  const int page = token_pages[token];
  if (page < 0) return;
  T* const k_row = pool + page * page_stride + layer_offset + token_offsets[token] * HEAD_DIM;
  T* const v_row = k_row + static_cast<long long>(kv_heads) * (PAGE * HEAD_DIM);

  const T* const v_from = values + token * value_stride;
  for (int i = threadIdx.x; i < kv_heads * VECTORS; i += blockDim.x) {
    const int head = i / VECTORS, index = i % VECTORS;
    if (values != nullptr)
      *reinterpret_cast<uint4*>(v_row + head * (PAGE * HEAD_DIM) + index * 8) = vector(v_from, head, index);
    if constexpr (!ROTATE)
      *reinterpret_cast<uint4*>(k_row + head * (PAGE * HEAD_DIM) + index * 8) =
          vector(keys + token * key_stride, head, index);
  }

  if constexpr (ROTATE) {
    for (int i = threadIdx.x; i < (heads + kv_heads) * HALF; i += blockDim.x) {
      const int head = i / HALF, index = i % HALF;
      const bool is_query = head < heads;
      const T* const row = is_query ? queries + token * query_stride : keys + token * key_stride;
      const int from = is_query ? head : head - heads;
      T* const to = is_query ? rotated + (token * heads + head) * HEAD_DIM : k_row + from * (PAGE * HEAD_DIM);
      float low[8], high[8], cos[8], sin[8];
      widen8<T>(low, vector(row, from, index));
      widen8<T>(high, vector(row, from, index + HALF));
      widen8<T>(cos, vector(cosines + token * HEAD_DIM, 0, index));
      widen8<T>(sin, vector(sines + token * HEAD_DIM, 0, index));
      *reinterpret_cast<uint4*>(to + index * 8) = rotate8<T>(low, high, -1.f, cos, sin);
      widen8<T>(cos, vector(cosines + token * HEAD_DIM, 0, index + HALF));
      widen8<T>(sin, vector(sines + token * HEAD_DIM, 0, index + HALF));
      *reinterpret_cast<uint4*>(to + (index + HALF) * 8) = rotate8<T>(high, low, 1.f, cos, sin);
    }
  }
}
