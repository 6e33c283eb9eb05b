// Paged decode on CUDA cores, for groups of 1 or 2 query heads: an mma would be mostly padding.
//
// Work is divided as in decode_mma.cu: a block attends to one split of one sequence for one KV head, and its warps
// take turns at tiles of 16 tokens, each with its own cp.async ring. Within a warp, LANES lanes share a token's row.
// Each lane takes VECTORS 16-byte vectors of it and multiplies them with its part of every query; shuffles add the
// LANES partial sums. A lane reads only data that it copied itself, so its own cp.async_wait is the only
// synchronisation in the main loop.
//
// grid (kv_heads, most splits of a sequence, sequences), block WARPS * 32, dynamic shared memory WARPS * STAGES * 64
// * HEAD_DIM bytes, or the size of WarpStates if that is larger.
#include <ptx.cuh>

#include "numbers.cuh"
#include "paged.cuh"
#include "scores.cuh"
#include "split.cuh"

// The lanes that share a token's row: a power of two, at most 8, so that a lane has at least 2 vectors of a long row
// and the shuffles cost no more than the products. It is 16 if a lane's share would not fit its registers.
__device__ constexpr int lanes_per_row(int head_dim) {
  const int chunks = head_dim / 8;
  if (chunks % 32 == 0) return 16;
  if (chunks % 8 == 0) return 8;
  return chunks % 4 == 0 ? 4 : 2;
}

template <class T, int HEAD_DIM, int PAGE, int GROUP, int WARPS, int STAGES, class KV = Floats, bool CAPPED = false>
__global__ void __launch_bounds__(WARPS * 32)
    decode_simt(const T* __restrict__ queries,   // the parameters are those of decode_mma
                const int* __restrict__ rows,
                const typename KV::template Stored<T>* __restrict__ pool, long long page_stride,
                long long layer_offset, const float* __restrict__ static_scales,
                const int* __restrict__ tables, int table_stride,
                const int* __restrict__ lengths,
                float* __restrict__ part_out,
                float* __restrict__ part_log2,
                int group, int window, int chunk, int min_split_pages, int max_splits, float scale, float cap) {
  constexpr int TOKENS = 16, TILE = TOKENS * HEAD_DIM;
  constexpr int LANES = lanes_per_row(HEAD_DIM), VECTORS = HEAD_DIM / 8 / LANES;
  constexpr int ROWS = 32 / LANES, PASSES = TOKENS / ROWS;  // tokens that a warp takes at once, passes per tile
  static_assert(PAGE % TOKENS == 0, "a tile lies in one page");
  extern __shared__ __align__(16) unsigned char smem[];

  const int kv_head = blockIdx.x, split = blockIdx.y, sequence = blockIdx.z, kv_heads = gridDim.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = lane % LANES, row = lane / LANES;
  const int length = lengths[sequence];
  const int first = first_visible(length - 1, window, chunk);
  const int splits = split_count<PAGE>(first, length, min_split_pages, max_splits);
  if (split >= splits) return;
  const TokenRange range = split_range<PAGE>(first, length, split, splits);
  const HeadPages<T, HEAD_DIM, PAGE, KV> pages(pool, page_stride, layer_offset, static_scales,
                                               tables + sequence * table_stride, kv_head, kv_heads);
  const int heads = kv_heads * GROUP, first_head = kv_head * GROUP;

  const int begin = range.begin / TOKENS * TOKENS + warp * TOKENS;
  const int tiles = begin < range.end ? (range.end - begin + WARPS * TOKENS - 1) / (WARPS * TOKENS) : 0;
  T* const ring = reinterpret_cast<T*>(smem) + warp * (STAGES * 2 * TILE);
  // The places of this lane's vectors in a tile. Eight lanes read 128 contiguous bytes, without bank conflicts.
  auto place = [&](int pass, int vector) {
    return (pass * ROWS + row) * HEAD_DIM + (vector * LANES + share) * 8;
  };

  int next_page = tiles > 0 ? pages.page_of(begin) : 0;
  auto load = [&](int tile) {
    if (tile < tiles) {
      const int token = begin + tile * (WARPS * TOKENS);
      const auto from = pages.rows(next_page, token);
      T* const k_tile = ring + tile % STAGES * (2 * TILE);
      if (tile + 1 < tiles) next_page = pages.page_of(token + WARPS * TOKENS);
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) {
        const int at_token = token + pass * ROWS + row;
        const bool wanted = at_token >= range.begin && at_token < range.end;
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
          const int at = place(pass, vector), of_row = pass * ROWS + row, chunk = vector * LANES + share;
          from.copy(k_tile + at, k_tile + TILE + at, of_row, chunk, wanted);
        }
      }
    }
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) load(stage);

  const Scores<CAPPED> scoring(scale, cap);
  const T* const q_heads = queries + (static_cast<long long>(rows[sequence]) * heads + first_head) * HEAD_DIM;
  float q[GROUP][VECTORS][8], out[GROUP][VECTORS][8] = {}, maximum[GROUP], denominator[GROUP];
#pragma unroll
  for (int head = 0; head < GROUP; head++) {
    maximum[head] = NEGATIVE_INFINITY;
    denominator[head] = 0.f;
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
      const T* const from = q_heads + head * HEAD_DIM + (vector * LANES + share) * 8;
      widen8<T>(q[head][vector], *reinterpret_cast<const uint4*>(from));
#pragma unroll
      for (int i = 0; i < 8; i++) q[head][vector][i] *= CAPPED ? 1.f : scoring.outer;
    }
  }

  for (int tile = 0; tile < tiles; tile++) {
    load(tile + STAGES - 1);
    ptx::cp_async_wait<STAGES - 1>();
    const T* const k_tile = ring + tile % STAGES * (2 * TILE);
    const T* const v_tile = k_tile + TILE;
    const int token = begin + tile * (WARPS * TOKENS) + row;

    float scores[PASSES][GROUP];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
      for (int head = 0; head < GROUP; head++) scores[pass][head] = 0.f;
#pragma unroll
      for (int vector = 0; vector < VECTORS; vector++) {
        float k[8];
        widen8<T>(k, *reinterpret_cast<const uint4*>(k_tile + place(pass, vector)));
#pragma unroll
        for (int head = 0; head < GROUP; head++)
#pragma unroll
          for (int i = 0; i < 8; i++) scores[pass][head] += q[head][vector][i] * k[i];
      }
      const bool visible = token + pass * ROWS >= range.begin && token + pass * ROWS < range.end;
#pragma unroll
      for (int head = 0; head < GROUP; head++) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
          scores[pass][head] += __shfl_xor_sync(0xffffffffu, scores[pass][head], other);
        if constexpr (CAPPED) scores[pass][head] = scoring.of(scores[pass][head]) * scoring.outer;
        if (!visible) scores[pass][head] = NEGATIVE_INFINITY;
      }
    }

#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      float most = maximum[head];
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) most = fmaxf(most, scores[pass][head]);
      // These lanes may have seen no token yet: -inf - -inf would be NaN.
      const float base = most == NEGATIVE_INFINITY ? 0.f : most;
      const float rescale = ptx::exp2_approx(maximum[head] - base);
      maximum[head] = most;
      denominator[head] *= rescale;
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) {
        scores[pass][head] = ptx::exp2_approx(scores[pass][head] - base);
        denominator[head] += scores[pass][head];
      }
#pragma unroll
      for (int vector = 0; vector < VECTORS; vector++)
#pragma unroll
        for (int i = 0; i < 8; i++) out[head][vector][i] *= rescale;
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
      for (int vector = 0; vector < VECTORS; vector++) {
        float v[8];
        widen8<T>(v, *reinterpret_cast<const uint4*>(v_tile + place(pass, vector)));
#pragma unroll
        for (int head = 0; head < GROUP; head++)
#pragma unroll
          for (int i = 0; i < 8; i++) out[head][vector][i] += scores[pass][head] * v[i];
      }
  }

  // The lanes' rows saw different tokens. First the lanes of a warp merge, then the warps.
  ptx::cp_async_wait<0>();
  __syncthreads();  // the states overwrite the rings
  const WarpStates<HEAD_DIM, WARPS, GROUP> states(smem);
#pragma unroll
  for (int head = 0; head < GROUP; head++) {
    float most = maximum[head];
#pragma unroll
    for (int other = LANES; other < 32; other *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
    const float weight = most == NEGATIVE_INFINITY ? 0.f : ptx::exp2_approx(maximum[head] - most);
    float sum = denominator[head] * weight;
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0) {
      states.maximum[warp * GROUP + head] = most;
      states.denominator[warp * GROUP + head] = sum;
    }
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float value = out[head][vector][i] * weight;
#pragma unroll
        for (int other = LANES; other < 32; other *= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
        if (row == 0)
          states.out[(warp * GROUP + head) * HEAD_DIM + (vector * LANES + share) * 8 + i] = value;
      }
  }
  __syncthreads();
  const long long part = (static_cast<long long>(sequence) * gridDim.y + split) * heads + first_head;
  states.store(part_out + part * HEAD_DIM, part_log2 + part, GROUP);
}
