// The gated delta rule over recurrent states in pages (states.cuh).
//
//   S  <-  a S + k (x) b (v - a S^T k)        a token reads S^T q
#include <ptx.cuh>

#include "numbers.cuh"
#include "states.cuh"

// PARTS threads hold a column of a head's matrix in registers. grid (value_heads, sequences), block THREADS (4 *
// VALUE_DIM, rounded up to whole warps), dynamic shared memory 2 * KEY_DIM * 4 bytes.
template <class T, int KEY_DIM, int VALUE_DIM, int THREADS>
__global__ void __launch_bounds__(THREADS)
    delta_rule(const T* __restrict__ mixed,       // [tokens, queries | keys | values]
               const float* __restrict__ rates,   // [tokens, value_heads]
               const float* __restrict__ decays,  // [tokens, value_heads], logarithms
               const int* __restrict__ rows, const int* __restrict__ counts, const int* __restrict__ lengths,
               const int* __restrict__ drafts,  // or null
               const int* __restrict__ pages, int page_step,
               unsigned char* __restrict__ pool, long long page_stride, long long offset,  // in bytes
               T* __restrict__ out,                                                        // [tokens, value_heads, VALUE_DIM]
               int key_heads) {
  constexpr int ROWS = KEY_DIM / PARTS;
  constexpr float EPSILON = 1e-6f;  // for the norms of queries and keys
  static_assert(KEY_DIM % PARTS == 0, "each part of a column has as many rows");
  static_assert(THREADS % 32 == 0 && THREADS >= PARTS * VALUE_DIM, "each column has its threads");
  extern __shared__ __align__(16) unsigned char smem[];
  float* const query = reinterpret_cast<float*>(smem);
  float* const key = query + KEY_DIM;

  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y;
  const int column = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
  const Spans span(rows, counts, lengths, drafts, sequence);
  if (span.count == 0) return;
  float* const matrix = in_page<float>(pool, pages[sequence * page_step], page_stride, offset) +
                        static_cast<long long>(head) * (KEY_DIM * VALUE_DIM);
  const bool mine = column < VALUE_DIM;
  float state[ROWS];  // row i * PARTS + part
#pragma unroll
  for (int i = 0; i < ROWS; i++)
    state[i] = mine && !span.begins ? matrix[(i * PARTS + part) * VALUE_DIM + column] : 0.f;

  const int keys_width = key_heads * KEY_DIM, width = 2 * keys_width + heads * VALUE_DIM;
  const int key_head = head / (heads / key_heads);
  for (int token = 0; token < span.count; token++) {
    const long long place = span.row + token;
    const T* const from = mixed + place * width;
    __syncthreads();  // all threads have finished the previous token
    for (int i = threadIdx.x; i < KEY_DIM; i += THREADS) {
      query[i] = Numbers<T>::widen(from[key_head * KEY_DIM + i]);
      key[i] = Numbers<T>::widen(from[keys_width + key_head * KEY_DIM + i]);
    }
    __syncthreads();  // queries and keys are written
    float of_query = 0.f, of_key = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      of_query += query[i * PARTS + part] * query[i * PARTS + part];
      of_key += key[i * PARTS + part] * key[i * PARTS + part];
    }
    of_query = 1.f / sqrtf((over_parts(of_query) + EPSILON) * KEY_DIM);
    of_key = 1.f / sqrtf(over_parts(of_key) + EPSILON);

    const float decay = ptx::exp2_approx(decays[place * heads + head] * LOG2_E);
    float known = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      state[i] *= decay;
      known += state[i] * key[i * PARTS + part];
    }
    known = over_parts(known);
    const float value = mine ? Numbers<T>::widen(from[2 * keys_width + head * VALUE_DIM + column]) : 0.f;
    const float correction = rates[place * heads + head] * (value - known * of_key) * of_key;
    float read = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      state[i] += key[i * PARTS + part] * correction;
      read += state[i] * query[i * PARTS + part];
    }
    read = over_parts(read);
    if (mine && part == 0) out[(place * heads + head) * VALUE_DIM + column] = Numbers<T>::narrow(read * of_query);
    if (token + 1 != span.certain || !mine) continue;
#pragma unroll
    for (int i = 0; i < ROWS; i++) matrix[(i * PARTS + part) * VALUE_DIM + column] = state[i];
  }
}
