// Mamba-2: states in pages (states.cuh) that every token adds to, and that decay by a factor of each token.
//
//   S  <-  exp(step * decay) S + B (x) step * x        a token reads S^T C + skip * x
//
// The heads of a group share B and C. The columns of a head's matrix are independent. Each block takes 32 of them, so
// that a small model with few heads has enough blocks, and any head_dim is supported.
#include "numbers.cuh"
#include "states.cuh"

constexpr int COLUMNS = 32, THREADS = PARTS * COLUMNS;
constexpr int TILE = 8;  // tokens whose data is in shared memory at once: one pair of barriers per tile
constexpr float STRAIGHT = 20.f;  // from here on softplus(x) is x

// grid (ceil(head_dim / 32), heads, sequences), block 128, dynamic shared memory TILE * (2 * STATE_DIM + 34) * 4 bytes.
// Without a number of blocks per SM the compiler spills for Blackwell.
template <class T, int STATE_DIM>
__global__ void __launch_bounds__(128, STATE_DIM > 128 ? 2 : 4)
    mamba2_rule(const T* __restrict__ mixed,                  // [tokens, x of all heads | B, C of all groups]
                const T* __restrict__ steps, int row_step,    // [tokens, heads], rows row_step apart; before softplus
                const float* __restrict__ biases,             // [heads], for the steps
                const float* __restrict__ decays,             // [heads], below 0
                const float* __restrict__ skips,              // [heads]
                float least_step, float most_step,
                const int* __restrict__ rows, const int* __restrict__ counts, const int* __restrict__ lengths,
                const int* __restrict__ drafts,  // or null
                const int* __restrict__ pages, int page_step,
                unsigned char* __restrict__ pool, long long page_stride, long long offset,  // in bytes
                float* __restrict__ out,  // [tokens, heads, head_dim]
                int groups, int head_dim) {
  constexpr int ROWS = STATE_DIM / PARTS;
  static_assert(STATE_DIM % PARTS == 0, "each part of a column has as many rows");
  extern __shared__ __align__(16) unsigned char smem[];
  float* const query = reinterpret_cast<float*>(smem);  // C [TILE][STATE_DIM]
  float* const key = query + TILE * STATE_DIM;          // B [TILE][STATE_DIM]
  float* const value = key + TILE * STATE_DIM;          // x [TILE][COLUMNS]
  float* const size = value + TILE * COLUMNS;           // [TILE], the step
  float* const left = size + TILE;                      // [TILE], the decay of the state

  const int first_column = blockIdx.x * COLUMNS, head = blockIdx.y, heads = gridDim.y, sequence = blockIdx.z;
  const int column = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
  const Spans span(rows, counts, lengths, drafts, sequence);
  if (span.count == 0) return;
  float* const matrix = in_page<float>(pool, pages[sequence * page_step], page_stride, offset) +
                        static_cast<long long>(head) * STATE_DIM * head_dim + first_column + column;
  const bool mine = first_column + column < head_dim;
  float state[ROWS];  // row i * PARTS + part
#pragma unroll
  for (int i = 0; i < ROWS; i++) state[i] = mine && !span.begins ? matrix[(i * PARTS + part) * head_dim] : 0.f;

  const int group = head / (heads / groups);
  const int keys = heads * head_dim + group * STATE_DIM, queries = keys + groups * STATE_DIM;
  const int width = heads * head_dim + 2 * groups * STATE_DIM;
  const float skip = skips[head];
  for (int done = 0, tokens; done < span.count; done += tokens) {
    const int end = done < span.certain ? span.certain : span.count;  // the state is written at the end of a tile
    tokens = min(TILE, end - done);
    const long long row = span.row + done;
    const T* const from = mixed + row * width;
    __syncthreads();  // all threads have finished the previous tile
    for (int i = threadIdx.x; i < tokens * STATE_DIM; i += THREADS) {
      const int at = i / STATE_DIM * width + i % STATE_DIM;
      key[i] = Numbers<T>::widen(from[at + keys]);
      query[i] = Numbers<T>::widen(from[at + queries]);
    }
    for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
      const int of = first_column + i % COLUMNS;
      value[i] = of < head_dim ? Numbers<T>::widen(from[i / COLUMNS * width + head * head_dim + of]) : 0.f;
    }
    if (threadIdx.x < tokens) {
      // Exact exponentials: errors of a slowly decaying state add up over a long sequence.
      const float given = Numbers<T>::widen(steps[(row + threadIdx.x) * row_step + head]) + biases[head];
      const float positive = given > STRAIGHT ? given : log1pf(expf(given));
      const float step = fminf(fmaxf(positive, least_step), most_step);
      size[threadIdx.x] = step;
      left[threadIdx.x] = expf(step * decays[head]);
    }
    __syncthreads();  // the tile is written
    for (int token = 0; token < tokens; token++) {
      const float x = value[token * COLUMNS + column], added = size[token] * x, stays = left[token];
      float read = 0.f;
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const int at = token * STATE_DIM + i * PARTS + part;
        state[i] = stays * state[i] + key[at] * added;
        read += state[i] * query[at];
      }
      read = over_parts(read);
      if (mine && part == 0) out[((row + token) * heads + head) * head_dim + first_column + column] = read + skip * x;
    }
    if (done + tokens != span.certain || !mine) continue;
#pragma unroll
    for (int i = 0; i < ROWS; i++) matrix[(i * PARTS + part) * head_dim] = state[i];
  }
}
