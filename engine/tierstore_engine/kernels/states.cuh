// Shared code of the kernels for recurrent states. For each layer a page has the last inputs of the causal
// convolution [channels][WIDTH - 1], the newest last, and a float32 matrix [rows][columns] for each head. The kernels
// read the state (zeros for a new sequence), process the sequence's new tokens one by one, and write the state after
// them, or before those that are a draft. Decode steps and prefill chunks do the same work, and the division of tokens
// into steps changes no bits.
#pragma once

// The places of the sequences' new tokens. A sequence of length 0 is skipped. The state after the first `certain` tokens
// is written; the others are a draft (drafts may be null: there is none).
struct Spans {
  int row, count, certain;
  bool begins;

  __device__ __forceinline__ Spans(const int* rows, const int* counts, const int* lengths, const int* drafts,
                                   int sequence)
      : row(rows[sequence]),
        count(lengths[sequence] > 0 ? counts[sequence] : 0),
        certain(count - (drafts != nullptr ? drafts[sequence] : 0)),
        begins(lengths[sequence] == counts[sequence]) {}
};

// The address `offset` bytes into a page.
template <class T>
__device__ __forceinline__ T* in_page(unsigned char* pool, int page, long long page_stride, long long offset) {
  return reinterpret_cast<T*>(pool + page * page_stride + offset);
}

constexpr int PARTS = 4;  // adjacent threads that share a column of a matrix, every fourth row each

// The sum over the threads that share a column.
__device__ __forceinline__ float over_parts(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
