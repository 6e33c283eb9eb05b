// Where a sequence's keys and values are.
//
// The pool is [page][layer][K|V][kv_head][token][head_dim]. A block table names the page of every PAGE tokens
// of a sequence, so one head's keys of one page are PAGE x HEAD_DIM contiguous numbers, and its values follow
// one plane (all KV heads' keys) later. Offsets are 64-bit: a pool is larger than 2^31 numbers.
#pragma once

template <class T, int HEAD_DIM, int PAGE>
struct HeadPages {
  const T* base;          // the head's keys of this layer in page 0
  long long page_stride;  // numbers from one page to the next
  long long plane;        // numbers from K to V
  const int* table;       // the sequence's pages

  __device__ __forceinline__ HeadPages(const T* pool, long long page_stride, long long layer_offset,
                                       const int* table, int kv_head, int kv_heads)
      : base(pool + layer_offset + kv_head * (PAGE * HEAD_DIM)),
        page_stride(page_stride),
        plane(static_cast<long long>(kv_heads) * (PAGE * HEAD_DIM)),
        table(table) {}

  __device__ __forceinline__ int page_of(int token) const { return table[token / PAGE]; }

  // The keys of `token`, which lies in `page`; those of the page's later tokens follow.
  __device__ __forceinline__ const T* keys(int page, int token) const {
    return base + page * page_stride + (token % PAGE) * HEAD_DIM;
  }
};
