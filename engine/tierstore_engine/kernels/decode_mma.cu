// Paged decode on tensor cores: one new token per sequence, all query heads of a KV head at once.
//
// The query heads that share a KV head (`group`, up to 16) are the 16 rows of an mma operand, so K and V are read
// from HBM once for all of them. Rows beyond the group are zero. A block attends to one split of one sequence for one
// KV head. Its warps take turns at tiles of 16 tokens, each with its own online softmax and cp.async ring: in the
// main loop no warp waits for another. They merge at the end.
//
//   S[16 rows x 16 tokens] = Q K^T        (K: ldmatrix, HEAD_DIM / 16 mma steps, two halves of 8 tokens)
//   O[16 rows x HEAD_DIM] += softmax(S) V (S stays in registers: an mma result is laid out like an mma operand)
//
// grid (kv_heads, most splits of a sequence, sequences), block WARPS * 32, dynamic shared memory WARPS * STAGES * 64
// * HEAD_DIM bytes, or the size of WarpStates if that is larger.
#include <ptx.cuh>

#include "numbers.cuh"
#include "paged.cuh"
#include "scores.cuh"
#include "split.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int PAGE, int WARPS, int STAGES, class KV = Floats, bool CAPPED = false>
__global__ void __launch_bounds__(WARPS * 32)
    decode_mma(const T* __restrict__ queries,      // [tokens, heads, HEAD_DIM]
               const int* __restrict__ rows,       // [sequences]: each one's row of queries
               const typename KV::template Stored<T>* __restrict__ pool, long long page_stride,
               long long layer_offset, const float* __restrict__ static_scales,  // for codes: null, or those of the layer
               const int* __restrict__ tables, int table_stride,
               const int* __restrict__ lengths,    // [sequences], with the new token; 0: no sequence
               float* __restrict__ part_out,       // [sequences, gridDim.y, heads, HEAD_DIM]
               float* __restrict__ part_log2,      // [sequences, gridDim.y, heads]
               int group, int window, int chunk, int min_split_pages, int max_splits, float scale, float cap) {
  constexpr int TOKENS = 16, CHUNKS = Tile<HEAD_DIM>::CHUNKS, TILE = TOKENS * HEAD_DIM;
  static_assert(PAGE % TOKENS == 0, "a tile lies in one page");
  extern __shared__ __align__(16) unsigned char smem[];

  const int kv_head = blockIdx.x, split = blockIdx.y, sequence = blockIdx.z, kv_heads = gridDim.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int length = lengths[sequence];
  const int first = first_visible(length - 1, window, chunk);
  const int splits = split_count<PAGE>(first, length, min_split_pages, max_splits);
  if (split >= splits) return;
  const TokenRange range = split_range<PAGE>(first, length, split, splits);
  const HeadPages<T, HEAD_DIM, PAGE, KV> pages(pool, page_stride, layer_offset, static_scales,
                                               tables + sequence * table_stride, kv_head, kv_heads);
  const int heads = kv_heads * group, first_head = kv_head * group;

  // The warp's tiles: every WARPS-th, from `begin` (a multiple of 16) on.
  const int begin = range.begin / TOKENS * TOKENS + warp * TOKENS;
  const int tiles = begin < range.end ? (range.end - begin + WARPS * TOKENS - 1) / (WARPS * TOKENS) : 0;
  T* const ring = reinterpret_cast<T*>(smem) + warp * (STAGES * 2 * TILE);

  // The page of the next tile is looked up one tile ahead, so that the copy need not wait for it.
  int next_page = tiles > 0 ? pages.page_of(begin) : 0;
  auto load = [&](int tile) {
    if (tile < tiles) {
      const int token = begin + tile * (WARPS * TOKENS);
      const auto from = pages.rows(next_page, token);
      T* const k_tile = ring + tile % STAGES * (2 * TILE);
      T* const v_tile = k_tile + TILE;
      if (tile + 1 < tiles) next_page = pages.page_of(token + WARPS * TOKENS);
#pragma unroll
      for (int i = lane; i < TOKENS * CHUNKS; i += 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, place = Tile<HEAD_DIM>::at(row, chunk);
        // Tokens outside the range become zeros: their memory may hold NaN, and a weight of zero times NaN is NaN.
        const bool wanted = token + row >= range.begin && token + row < range.end;
        from.copy(k_tile + place, v_tile + place, row, chunk, wanted);
      }
    }
    ptx::cp_async_commit();  // also if nothing was copied, because waiting counts groups
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) load(stage);

  // Q as mma operands, directly from global memory: rows lane / 4 and lane / 4 + 8.
  unsigned q[HEAD_DIM / 16][4];
  const T* const q_heads = queries + (static_cast<long long>(rows[sequence]) * heads + first_head) * HEAD_DIM;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int row = lane / 4 + part % 2 * 8, dim = step * 16 + part / 2 * 8 + lane % 4 * 2;
      q[step][part] = row < group ? *reinterpret_cast<const unsigned*>(q_heads + row * HEAD_DIM + dim) : 0u;
    }

  const Scores<CAPPED> scoring(scale, cap);
  float out[HEAD_DIM / 8][4] = {};
  float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, denominator[2] = {0.f, 0.f};
  for (int tile = 0; tile < tiles; tile++) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncwarp();  // lanes read copies of other lanes, and overwrite data that others have read
    load(tile + STAGES - 1);
    const T* const k_tile = ring + tile % STAGES * (2 * TILE);
    const T* const v_tile = k_tile + TILE;

    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
      unsigned k[4];
      ptx::ldmatrix_x4(k, k_tile + Tile<HEAD_DIM>::at(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      ptx::mma_m16n8k16<T>(scores[0], q[step], k[0], k[1]);
      ptx::mma_m16n8k16<T>(scores[1], q[step], k[2], k[3]);
    }

    // A lane holds tokens 2 (lane % 4) and the next one of each half, for two rows. The quad holds whole rows.
    const int token = begin + tile * (WARPS * TOKENS) + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float most = maximum[half];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = token + i / 2 * 8 + i % 2;
        float& score = scores[i / 2][half * 2 + i % 2];
        score = column >= range.begin && column < range.end ? scoring.of(score) * scoring.outer : NEGATIVE_INFINITY;
        most = fmaxf(most, score);
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float rescale = ptx::exp2_approx(maximum[half] - most);  // a tile has a visible token: most > -inf
      maximum[half] = most;
      denominator[half] *= rescale;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& score = scores[i / 2][half * 2 + i % 2];
        score = ptx::exp2_approx(score - most);
        denominator[half] += score;
      }
#pragma unroll
      for (int column = 0; column < HEAD_DIM / 8; column++) {
        out[column][half * 2] *= rescale;
        out[column][half * 2 + 1] *= rescale;
      }
    }

    const unsigned weights[4] = {Numbers<T>::narrow_pair(scores[0][0], scores[0][1]),
                                 Numbers<T>::narrow_pair(scores[0][2], scores[0][3]),
                                 Numbers<T>::narrow_pair(scores[1][0], scores[1][1]),
                                 Numbers<T>::narrow_pair(scores[1][2], scores[1][3])};
#pragma unroll
    for (int column = 0; column < HEAD_DIM / 8; column += 2) {
      unsigned v[4];
      ptx::ldmatrix_x4_trans(v, v_tile + Tile<HEAD_DIM>::at(lane % 16, column + lane / 16));
      ptx::mma_m16n8k16<T>(out[column], weights, v[0], v[1]);
      ptx::mma_m16n8k16<T>(out[column + 1], weights, v[2], v[3]);
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // the states overwrite the rings
  const WarpStates<HEAD_DIM, WARPS, 16> states(smem);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = lane / 4 + half * 8;
    float sum = denominator[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (row >= group) continue;
    if (lane % 4 == 0) {
      states.maximum[warp * 16 + row] = maximum[half];
      states.denominator[warp * 16 + row] = sum;
    }
    float* const to = states.out + (warp * 16 + row) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int column = 0; column < HEAD_DIM / 8; column++) {
      to[column * 8] = out[column][half * 2];
      to[column * 8 + 1] = out[column][half * 2 + 1];
    }
  }
  __syncthreads();
  const long long part = (static_cast<long long>(sequence) * gridDim.y + split) * heads + first_head;
  states.store(part_out + part * HEAD_DIM, part_log2 + part, group);
}
