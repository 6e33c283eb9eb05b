// The places of a sequence's keys and values, and their format: T, or codes under scales.
//
// The pool is [page][layer][K|V][kv_head][token][head_dim]. A block table names the page of every PAGE tokens of a
// sequence. So one head's keys in one page are PAGE x HEAD_DIM contiguous numbers, and its values follow one plane
// (all KV heads' keys) later. For codes, a layer's scales [K|V][kv_head][token] follow its planes, unless scales are
// static. Offsets are 64-bit, because a pool has more than 2^31 numbers.
#pragma once
#include <ptx.cuh>

#include "codes.cuh"

// The format of KV. `Stored<T>` is the unit of a pool's strides and offsets.
struct Floats {
  static constexpr int UNROLL = 64;  // unrolls all loops over copies
  template <class T>
  using Stored = T;
};

template <class K, class V>
struct Codes {
  static constexpr int UNROLL = 1;  // dequantising takes registers
  template <class T>
  using Stored = unsigned char;
  using Key = K;
  using Value = V;
};

template <class T, int HEAD_DIM, int PAGE, class KV>
struct HeadPages;

template <class T, int HEAD_DIM, int PAGE>
struct HeadPages<T, HEAD_DIM, PAGE, Floats> {
  const T* base;          // the head's keys of this layer in page 0
  long long page_stride;  // numbers from one page to the next
  long long plane;        // numbers from K to V
  const int* table;       // the sequence's pages

  __device__ __forceinline__ HeadPages(const T* pool, long long page_stride, long long layer_offset,
                                       const float* static_scales, const int* table, int kv_head, int kv_heads)
      : base(pool + layer_offset + kv_head * (PAGE * HEAD_DIM)),
        page_stride(page_stride),
        plane(static_cast<long long>(kv_heads) * (PAGE * HEAD_DIM)),
        table(table) {}

  __device__ __forceinline__ int page_of(int token) const { return table[token / PAGE]; }

  // The vectors of a token, and of the page's later tokens.
  struct Rows {
    const T* keys;
    long long plane;

    // Copy 8 numbers of row `row` of both to shared memory, by cp.async; write zeros if they are not wanted.
    __device__ __forceinline__ void copy(T* k_to, T* v_to, int row, int chunk, bool wanted) const {
      const T* const from = keys + row * HEAD_DIM + chunk * 8;
      ptx::cp_async16(k_to, from, wanted);
      ptx::cp_async16(v_to, from + plane, wanted);
    }
  };

  __device__ __forceinline__ Rows rows(int page, int token) const {
    return {base + page * page_stride + (token % PAGE) * HEAD_DIM, plane};
  }
};

// One layer of one page of codes.
template <int HEAD_DIM, int PAGE, class KV>
struct CodePlanes {
  static constexpr int KEY_BYTES = HEAD_DIM * KV::Key::BITS / 8, VALUE_BYTES = HEAD_DIM * KV::Value::BITS / 8;
  unsigned char* base;
  int kv_heads;

  __device__ __forceinline__ CodePlanes(unsigned char* layer, int kv_heads) : base(layer), kv_heads(kv_heads) {}

  __device__ __forceinline__ unsigned char* key(int head, int token) const {
    return base + (head * PAGE + token) * KEY_BYTES;
  }
  __device__ __forceinline__ unsigned char* value(int head, int token) const {
    return base + kv_heads * (PAGE * KEY_BYTES) + (head * PAGE + token) * VALUE_BYTES;
  }
  __device__ __forceinline__ __nv_bfloat16* scale(int plane, int head, int token) const {
    unsigned char* const scales = base + kv_heads * (PAGE * (KEY_BYTES + VALUE_BYTES));
    return reinterpret_cast<__nv_bfloat16*>(scales) + (plane * kv_heads + head) * PAGE + token;
  }
};

template <class T, int HEAD_DIM, int PAGE, class K, class V>
struct HeadPages<T, HEAD_DIM, PAGE, Codes<K, V>> {
  using Planes = CodePlanes<HEAD_DIM, PAGE, Codes<K, V>>;
  const unsigned char* base;  // the layer in page 0
  long long page_stride;
  const float* static_scales;  // [2][kv_heads], or null
  const int* table;
  int kv_head, kv_heads;

  __device__ __forceinline__ HeadPages(const unsigned char* pool, long long page_stride, long long layer_offset,
                                       const float* static_scales, const int* table, int kv_head, int kv_heads)
      : base(pool + layer_offset),
        page_stride(page_stride),
        static_scales(static_scales),
        table(table),
        kv_head(kv_head),
        kv_heads(kv_heads) {}

  __device__ __forceinline__ int page_of(int token) const { return table[token / PAGE]; }

  struct Rows {
    const unsigned char *keys, *values;
    const __nv_bfloat16 *key_scales, *value_scales;
    const float *key_scale, *value_scale;  // static scales

    // Through registers, dequantised and rounded to T: a wait for cp.async also covers this.
    __device__ __forceinline__ void copy(T* k_to, T* v_to, int row, int chunk, bool wanted) const {
      numbers<K>(k_to, keys + row * Planes::KEY_BYTES + chunk * K::BITS, key_scales + row, key_scale, wanted);
      numbers<V>(v_to, values + row * Planes::VALUE_BYTES + chunk * V::BITS, value_scales + row, value_scale, wanted);
    }

   private:
    template <class CODE>
    static __device__ __forceinline__ void numbers(T* to, const unsigned char* codes, const __nv_bfloat16* scale,
                                                   const float* static_scale, bool wanted) {
      uint4 narrow = make_uint4(0, 0, 0, 0);
      if (wanted) {
        float wide[8];
        decode8<CODE>(wide, codes, static_scale != nullptr ? *static_scale : __bfloat162float(*scale));
        narrow = narrow8<T>(wide);
      }
      *reinterpret_cast<uint4*>(to) = narrow;
    }
  };

  __device__ __forceinline__ Rows rows(int page, int token) const {
    // Only for reading.
    const Planes planes(const_cast<unsigned char*>(base) + page * page_stride, kv_heads);
    const int first = token % PAGE;
    const float* const fixed = static_scales == nullptr ? nullptr : static_scales + kv_head;
    Rows rows;
    rows.keys = planes.key(kv_head, first);
    rows.values = planes.value(kv_head, first);
    rows.key_scales = planes.scale(0, kv_head, first);
    rows.value_scales = planes.scale(1, kv_head, first);
    rows.key_scale = fixed;
    rows.value_scale = fixed == nullptr ? nullptr : fixed + kv_heads;
    return rows;
  }
};
