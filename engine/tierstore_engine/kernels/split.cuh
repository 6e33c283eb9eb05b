// Split-KV decoding: how a sequence is cut into splits, and what a split writes.
//
// One new token per sequence gives a GPU too few blocks, so a long sequence is cut into splits for different blocks.
// The cut depends only on the sequence's own length, so the rest of the batch does not change a sequence's bits. It
// is computed on the device from the device's lengths, so that a captured CUDA graph stays valid while sequences
// grow.
//
// A split writes its output, already divided by its softmax denominator, and the base-2 logarithm of that denominator
// (-inf if it saw nothing). combine_splits (merge.cu) merges them.
#pragma once
#include <ptx.cuh>

#include "numbers.cuh"
#include "scores.cuh"

struct TokenRange {
  int begin, end;
};

// Return into how many splits the tokens from `first` up to `length` are cut.
template <int PAGE>
__device__ __forceinline__ int split_count(int first, int length, int min_split_pages, int max_splits) {
  const int pages = (length + PAGE - 1) / PAGE - first / PAGE;
  return min((pages + min_split_pages - 1) / min_split_pages, max_splits);
}

template <int PAGE>
__device__ __forceinline__ TokenRange split_range(int first, int length, int split, int splits) {
  const int first_page = first / PAGE;
  const int pages = (length + PAGE - 1) / PAGE - first_page;
  const int begin = first_page + static_cast<int>(static_cast<long long>(pages) * split / splits);
  const int end = first_page + static_cast<int>(static_cast<long long>(pages) * (split + 1) / splits);
  return {max(begin * PAGE, first), min(end * PAGE, length)};
}

// The results of a block's warps for the same ROWS queries, in shared memory.
template <int HEAD_DIM, int WARPS, int ROWS>
struct WarpStates {
  float* out;          // [WARPS][ROWS][HEAD_DIM], not yet divided
  float* maximum;      // [WARPS][ROWS], in base 2
  float* denominator;  // [WARPS][ROWS]
  static constexpr int BYTES = WARPS * ROWS * (HEAD_DIM + 2) * 4;

  __device__ __forceinline__ explicit WarpStates(unsigned char* shared)
      : out(reinterpret_cast<float*>(shared)),
        maximum(out + WARPS * ROWS * HEAD_DIM),
        denominator(maximum + WARPS * ROWS) {}

  // Merge the warps' states of the first `rows` queries into the split's output and logarithm. All threads of the
  // block must call this, after a barrier.
  __device__ __forceinline__ void store(float* part_out, float* part_log2, int rows) const {
    for (int element = threadIdx.x; element < rows * HEAD_DIM; element += WARPS * 32) {
      const int row = element / HEAD_DIM, dim = element % HEAD_DIM;
      float most = NEGATIVE_INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
      for (int warp = 0; warp < WARPS; warp++) most = fmaxf(most, maximum[warp * ROWS + row]);
      if (most != NEGATIVE_INFINITY) {
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
          const float weight = ptx::exp2_approx(maximum[warp * ROWS + row] - most);
          sum += weight * denominator[warp * ROWS + row];
          value += weight * out[(warp * ROWS + row) * HEAD_DIM + dim];
        }
        value /= sum;
      }
      part_out[element] = value;
      if (dim == 0) part_log2[row] = most + log2f(sum);
    }
  }
};
