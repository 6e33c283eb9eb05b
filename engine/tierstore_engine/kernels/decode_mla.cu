// Attention over latents (MLA, absorbed): one vector per token, which is the key of all heads. Without its last
// dimensions it is also their value. So a tile is copied once and read twice, by scores and by outputs.
//
// An entry is one query token: the last of `lengths` tokens of a sequence. Decoding has one entry per sequence; a
// prefill chunk has one per token. A block attends to one split of one entry for 16 of its heads, the rows of an mma.
// All warps share a tile of TILE tokens. For the scores each warp takes 8 tokens, and for the outputs 16 dimensions
// at a time, because no warp has registers for 512.
//
//   S[16 x TILE] = Q K^T      the warps agree on each row's maximum     P = exp(S), to shared memory
//   O[16 x RANK] += P K[:, :RANK]
//
// grid (ceil(heads / 16), most splits of an entry, entries), block WARPS * 32, dynamic shared memory
// LatentTiles::BYTES.
#include <ptx.cuh>

#include "numbers.cuh"
#include "split.cuh"
#include "tile.cuh"

// A block's shared memory. Rows are padded with zeros to whole mma steps.
template <class T, int WIDTH, int WARPS, int TILE>
struct LatentTiles {
  static constexpr int PADDED = (WIDTH + 15) / 16 * 16, ROWS = 16;
  static constexpr int BYTES = (ROWS + 2 * TILE) * PADDED * 2 + ROWS * TILE * 2 + 2 * WARPS * ROWS * 4;
  T *queries, *ring, *weights;  // [ROWS][PADDED], [2][TILE][PADDED], [ROWS][TILE]
  float *maxima, *sums;         // [WARPS][ROWS]

  __device__ __forceinline__ explicit LatentTiles(unsigned char* shared)
      : queries(reinterpret_cast<T*>(shared)),
        ring(queries + ROWS * PADDED),
        weights(ring + 2 * TILE * PADDED),
        maxima(reinterpret_cast<float*>(weights + ROWS * TILE)),
        sums(maxima + WARPS * ROWS) {}
};

template <class T, int WIDTH, int RANK, int PAGE, int TILE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
    decode_mla(const T* __restrict__ queries,  // [tokens, heads, WIDTH]
               const int* __restrict__ rows,   // [entries]: each one's row of queries
               const T* __restrict__ pool, long long page_stride, long long layer_offset,
               const int* __restrict__ tables, int table_stride,
               const int* __restrict__ table_rows,  // [entries]: the row of its table; null: each entry has its own
               const int* __restrict__ lengths,     // [entries]; 0: no entry
               float* __restrict__ part_out,        // [entries, gridDim.y, heads, RANK]; null: no splits, writes `out`
               float* __restrict__ part_log2,       // [entries, gridDim.y, heads]
               T* __restrict__ out,                 // [tokens, heads, RANK]
               float* __restrict__ lse,             // [tokens, heads], natural logarithm, or null
               int heads, int min_split_pages, int max_splits, float scale) {
  using Tiles = LatentTiles<T, WIDTH, WARPS, TILE>;
  using Row = Tile<Tiles::PADDED>;
  constexpr int THREADS = WARPS * 32, STEPS = Tiles::PADDED / 16, GROUPS = TILE / 8, PIECES = RANK / 16;
  constexpr int MINE = (PIECES + WARPS - 1) / WARPS;  // most pieces of 16 output dimensions per warp
  static_assert(PAGE % TILE == 0 && GROUPS <= WARPS, "a tile lies in one page, and is scored at once");
  static_assert(WIDTH % 8 == 0 && RANK % 16 == 0 && RANK <= WIDTH, "values are a key's first dimensions");
  extern __shared__ __align__(16) unsigned char smem[];
  const Tiles shared(smem);

  const int first_head = blockIdx.x * 16, split = blockIdx.y, entry = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int length = lengths[entry];
  const int splits = split_count<PAGE>(0, length, min_split_pages, max_splits);
  if (split >= splits) return;
  const TokenRange range = split_range<PAGE>(0, length, split, splits);
  const int* const table = tables + static_cast<long long>(table_rows == nullptr ? entry : table_rows[entry]) * table_stride;
  const long long query = static_cast<long long>(rows[entry]) * heads + first_head;

  // Rows beyond the heads and dimensions beyond WIDTH become zeros.
  for (int i = threadIdx.x; i < 16 * Row::CHUNKS; i += THREADS) {
    const int row = i / Row::CHUNKS, chunk = i % Row::CHUNKS;
    const bool wanted = first_head + row < heads && chunk < WIDTH / 8;
    const T* const from = queries + (wanted ? (query + row) * WIDTH + chunk * 8 : 0);
    ptx::cp_async16(shared.queries + Row::at(row, chunk), from, wanted);
  }
  auto tile_at = [&](int token) { return shared.ring + token / TILE % 2 * (TILE * Tiles::PADDED); };
  auto load = [&](int token) {
    const T* const page = pool + table[token / PAGE] * page_stride + layer_offset;
    T* const to = tile_at(token);
    for (int i = threadIdx.x; i < TILE * Row::CHUNKS; i += THREADS) {
      const int row = i / Row::CHUNKS, chunk = i % Row::CHUNKS;
      // Tokens beyond the range become zeros: their memory may hold NaN, and a weight of zero times NaN is NaN.
      const bool wanted = token + row < range.end && chunk < WIDTH / 8;
      const T* const from = page + (wanted ? (token % PAGE + row) * WIDTH + chunk * 8 : 0);
      ptx::cp_async16(to + Row::at(row, chunk), from, wanted);
    }
    ptx::cp_async_commit();
  };
  load(range.begin);  // nothing before is hidden, so the range begins at a page, and at a tile

  const float scale_log2 = scale * LOG2_E;
  float sums[MINE][2][4] = {};
  // For the rows lane / 4 and lane / 4 + 8. The maximum is the block's, the denominator covers the warp's own tokens.
  float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, denominator[2] = {0.f, 0.f};
  for (int token = range.begin; token < range.end; token += TILE) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no thread needs the previous one any more
    if (token + TILE < range.end) load(token + TILE);
    const T* const tile = tile_at(token);

    float scores[4] = {};
    if (warp < GROUPS) {
#pragma unroll 4
      for (int step = 0; step < STEPS; step += 2) {
        // Two steps of K in one load. Without a second step the second half is not used.
        unsigned k[4], q[4];
        ptx::ldmatrix_x4(k, tile + Row::at(warp * 8 + lane % 8, min(step * 2 + lane / 8, Row::CHUNKS - 1)));
        ptx::ldmatrix_x4(q, shared.queries + Row::at(lane % 16, step * 2 + lane / 16));
        ptx::mma_m16n8k16<T>(scores, q, k[0], k[1]);
        if (STEPS % 2 == 0 || step + 1 < STEPS) {
          ptx::ldmatrix_x4(q, shared.queries + Row::at(lane % 16, step * 2 + 2 + lane / 16));
          ptx::mma_m16n8k16<T>(scores, q, k[2], k[3]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float most = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = token + warp * 8 + lane % 4 * 2 + i;
          float& score = scores[half * 2 + i];
          score = column < range.end ? score * scale_log2 : NEGATIVE_INFINITY;
          most = fmaxf(most, score);
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        if (lane % 4 == 0) shared.maxima[warp * 16 + half * 8 + lane / 4] = most;
      }
    }
    __syncthreads();  // the maxima are written

    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float most = maximum[half];
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
        most = fmaxf(most, shared.maxima[group * 16 + half * 8 + lane / 4]);
      rescale[half] = ptx::exp2_approx(maximum[half] - most);  // a tile has a visible token: most > -inf
      maximum[half] = most;
      denominator[half] *= rescale[half];
      if (warp < GROUPS) {
        const float first = ptx::exp2_approx(scores[half * 2] - most);
        const float second = ptx::exp2_approx(scores[half * 2 + 1] - most);
        denominator[half] += first + second;
        *reinterpret_cast<unsigned*>(shared.weights + Tile<TILE>::at(half * 8 + lane / 4, warp) + lane % 4 * 2) =
            Numbers<T>::narrow_pair(first, second);
      }
    }
    __syncthreads();  // the weights are written

#pragma unroll
    for (int piece = 0; piece < MINE; piece++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[piece][i / 4][i % 4] *= rescale[i % 4 / 2];
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
      unsigned weights[4];
      ptx::ldmatrix_x4(weights, shared.weights + Tile<TILE>::at(lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int piece = 0; piece < MINE; piece++) {
        const int column = (piece * WARPS + warp) * 2;  // of 8 dimensions
        if (PIECES % WARPS != 0 && column >= PIECES * 2) break;
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, tile + Row::at(step * 16 + lane % 16, column + lane / 16));
        ptx::mma_m16n8k16<T>(sums[piece][0], weights, v[0], v[1]);
        ptx::mma_m16n8k16<T>(sums[piece][1], weights, v[2], v[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = denominator[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) shared.sums[warp * 16 + half * 8 + lane / 4] = sum;
  }
  __syncthreads();  // the sums are written
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = half * 8 + lane / 4;
    if (first_head + row >= heads) continue;
    float sum = 0.f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) sum += shared.sums[group * 16 + row];
    const float log2_sum = maximum[half] + log2f(sum);
    const long long part = (static_cast<long long>(entry) * gridDim.y + split) * heads + first_head + row;
    if (warp == 0 && lane % 4 == 0) {
      if (part_out != nullptr) part_log2[part] = log2_sum;
      if (part_out == nullptr && lse != nullptr) lse[query + row] = log2_sum * LN_2;
    }
#pragma unroll
    for (int i = 0; i < MINE * 2; i++) {
      const int column = (i / 2 * WARPS + warp) * 2 + i % 2;
      if (PIECES % WARPS != 0 && column >= PIECES * 2) break;
      const int dim = column * 8 + lane % 4 * 2;
      const float first = sums[i / 2][i % 2][half * 2] / sum, second = sums[i / 2][i % 2][half * 2 + 1] / sum;
      if (part_out != nullptr)
        *reinterpret_cast<float2*>(part_out + part * RANK + dim) = make_float2(first, second);
      else
        *reinterpret_cast<unsigned*>(out + (query + row) * RANK + dim) = Numbers<T>::narrow_pair(first, second);
    }
  }
}
