// Merge attention over parts of the keys. Each part has its output and the logarithm of its softmax denominator
// (LSE). They merge exactly:
//
//   lse = log(sum of exp(lse_i))        out = sum of out_i exp(lse_i - lse)
//
// combine_splits merges the splits of a decode step, combine_chunks those of a prefill chunk. merge_states merges two such
// results, of attention over KV on this device and over KV stored elsewhere. All write either `out` or `wide`, float32
// for another merge; the one that is not used is null. So each output is rounded once.
#include <ptx.cuh>

#include "numbers.cuh"
#include "split.cuh"

// Merge the `splits` parts at `first`, `first + stride` … of one query, with a block of HEAD_DIM threads. Some of the
// parts may have seen nothing, but not all.
template <class T, int HEAD_DIM>
__device__ __forceinline__ void combine_parts(const float* __restrict__ part_out, const float* __restrict__ part_log2,
                                              long long first, long long stride, int splits, T* __restrict__ out,
                                              float* __restrict__ wide, float* __restrict__ lse, long long query) {
  const int dim = threadIdx.x;
  // Read several parts at once. One at a time, each a trip to memory, 64 splits would take as long as attending to
  // thousands of tokens. If there are fewer, the last one is read again with weight zero.
  constexpr int AT_ONCE = 8;
  float most = NEGATIVE_INFINITY;
#pragma unroll 1
  for (int begin = 0; begin < splits; begin += AT_ONCE)
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) most = fmaxf(most, part_log2[first + min(begin + i, splits - 1) * stride]);
  float sum = 0.f, value = 0.f;
#pragma unroll 1
  for (int begin = 0; begin < splits; begin += AT_ONCE) {
    float logs[AT_ONCE], values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const long long part = first + min(begin + i, splits - 1) * stride;
      logs[i] = part_log2[part];
      values[i] = part_out[part * HEAD_DIM + dim];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float weight = begin + i < splits ? ptx::exp2_approx(logs[i] - most) : 0.f;
      sum += weight;
      value += weight * values[i];
    }
  }
  const long long element = query * HEAD_DIM + dim;
  if (wide != nullptr)
    wide[element] = value / sum;
  else
    out[element] = Numbers<T>::narrow(value / sum);
  if (lse != nullptr && dim == 0) lse[query] = (most + log2f(sum)) * LN_2;
}

// grid (heads, sequences), block HEAD_DIM.
template <class T, int HEAD_DIM, int PAGE>
__global__ void __launch_bounds__(HEAD_DIM)
    combine_splits(const float* __restrict__ part_out,   // [sequences, part_splits, heads, HEAD_DIM]
                   const float* __restrict__ part_log2,  // [sequences, part_splits, heads], base 2
                   const int* __restrict__ rows,         // [sequences]: each one's row of out
                   const int* __restrict__ lengths,      // [sequences]; 0: no sequence, nothing is written
                   T* __restrict__ out,                  // [tokens, heads, HEAD_DIM], or null
                   float* __restrict__ wide,             // the same, or null
                   float* __restrict__ lse,              // [tokens, heads], natural logarithm, or null
                   int part_splits, int window, int chunk, int min_split_pages, int max_splits) {
  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y;
  const int length = lengths[sequence], seen_from = first_visible(length - 1, window, chunk);
  const int splits = split_count<PAGE>(seen_from, length, min_split_pages, max_splits);
  if (splits == 0) return;
  const long long first = static_cast<long long>(sequence) * part_splits * heads + head;
  const long long query = static_cast<long long>(rows[sequence]) * heads + head;
  combine_parts<T, HEAD_DIM>(part_out, part_log2, first, heads, splits, out, wide, lse, query);
}

// grid (heads, max count, sequences), block HEAD_DIM.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM)
    combine_chunks(const float* __restrict__ part_out,      // [parts, heads, HEAD_DIM]
                   const float* __restrict__ part_log2,     // [parts, heads], base 2
                   const int* __restrict__ rows,            // [sequences]: each one's first row of out
                   const int* __restrict__ counts,          // [sequences]: its rows
                   const int* __restrict__ splits,          // [sequences]
                   const int* __restrict__ first_parts,     // [sequences]: parts [splits, count] begin here
                   T* __restrict__ out,                     // [tokens, heads, HEAD_DIM], or null
                   float* __restrict__ wide,                // the same, or null
                   float* __restrict__ lse) {               // [tokens, heads], natural logarithm, or null
  const int head = blockIdx.x, heads = gridDim.x, token = blockIdx.y, sequence = blockIdx.z;
  const int count = counts[sequence];
  if (token >= count) return;
  const long long first = (static_cast<long long>(first_parts[sequence]) + token) * heads + head;
  const long long query = (static_cast<long long>(rows[sequence]) + token) * heads + head;
  const long long stride = static_cast<long long>(count) * heads;
  combine_parts<T, HEAD_DIM>(part_out, part_log2, first, stride, splits[sequence], out, wide, lse, query);
}

// grid (queries = tokens * heads), block HEAD_DIM. A part that saw nothing has an LSE of -inf, and its output is
// ignored. If neither saw anything, the result is zeros and -inf.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM)
    merge_states(const float* __restrict__ a_out, const float* __restrict__ a_lse,  // [queries, HEAD_DIM], [queries]
                 const float* __restrict__ b_out, const float* __restrict__ b_lse,
                 T* __restrict__ out, float* __restrict__ wide,  // one of them is null
                 float* __restrict__ lse) {                      // or null
  const long long query = blockIdx.x, element = query * HEAD_DIM + threadIdx.x;
  const float a = a_lse[query], b = b_lse[query], most = fmaxf(a, b);
  float value = 0.f, sum = 1.f;
  if (most != NEGATIVE_INFINITY) {
    const float a_weight = ptx::exp2_approx((a - most) * LOG2_E), b_weight = ptx::exp2_approx((b - most) * LOG2_E);
    if (a_weight > 0.f) value += a_weight * a_out[element];
    if (b_weight > 0.f) value += b_weight * b_out[element];
    sum = a_weight + b_weight;
  }
  if (wide != nullptr)
    wide[element] = value / sum;
  else
    out[element] = Numbers<T>::narrow(value / sum);
  if (lse != nullptr && threadIdx.x == 0) lse[query] = most + log2f(sum) * LN_2;
}
