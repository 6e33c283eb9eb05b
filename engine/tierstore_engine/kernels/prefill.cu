// Paged prefill in the form of FlashAttention-2: many new tokens of a sequence, causally, over its paged past.
//
// A block takes ROWS rows of queries for one KV head of one sequence. A row is a (new token, query head) pair,
// token-major, so that the heads of one KV head share its tiles. The block walks over the keys in tiles of TILE
// tokens with an online softmax; scores and outputs stay in registers. Each warp owns STRIPS strips of 16 rows, and
// uses every fragment of K and V from shared memory for all of them.
//
// The new tokens are the last of the `lengths` tokens. Row i of `counts` sees all tokens up to its own position
// length - count + i, within the window or its attention chunk. This covers a cold prefill (count = length), a chunk
// after a cached prefix, and a single token. One launch handles any mix of lengths. If not `causal`, each row also sees
// the tokens behind it, up to `lengths`: those of an image see one another. Without a window and chunk, the new tokens
// may then be elsewhere, and `lengths` less than `counts`.
//
// A few new tokens after a long past are few blocks with much to read. With SPLIT a block's tiles are divided into
// `splits[sequence]` parts, each for its own block. A part writes the same as a decode split (split.cuh), and
// combine_chunks (merge.cu) merges the parts. The caller chooses the number of parts, for each sequence separately.
// With `part_tokens` (a multiple of TILE), parts begin at its multiples in the sequence. A token's bits then depend
// neither on the chunk that it is in nor on the rows beside it: what a row does not see leaves its bits as they are.
//
// grid (ceil(max count * group / ROWS), kv_heads, sequences * most_splits), block WARPS * 32, dynamic shared memory
// (ROWS + 4 * TILE) * HEAD_DIM * 2 bytes. For the smallest heads the compiler would spill to fit four blocks on an
// SM; three are enough. (0: no limit given.)
#include <ptx.cuh>

#include "numbers.cuh"
#include "paged.cuh"
#include "scores.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int PAGE, int TILE, int WARPS, int STRIPS, bool SPLIT, class KV = Floats,
          bool CAPPED = false>
__global__ void __launch_bounds__(WARPS * 32, HEAD_DIM == 16 ? 3 : 0)
    prefill(const T* __restrict__ queries,   // [tokens, heads, HEAD_DIM]
            const int* __restrict__ rows,    // [sequences]: each one's first row of queries
            const int* __restrict__ counts,  // [sequences]: its new tokens
            const typename KV::template Stored<T>* __restrict__ pool, long long page_stride,
            long long layer_offset, const float* __restrict__ static_scales,  // for codes: null, or those of the layer
            const int* __restrict__ tables, int table_stride,
            const int* __restrict__ lengths,  // [sequences]: its tokens, including new ones
            T* __restrict__ out,              // as queries
            float* __restrict__ lse,          // [tokens, heads], natural logarithm, or null
            // For a SPLIT instance, which writes the last two instead of the two above:
            const int* __restrict__ splits, int most_splits,  // [sequences], and the largest one
            const int* __restrict__ first_parts,  // [sequences]: parts [splits, count] begin here
            float* __restrict__ part_out,         // [parts, heads, HEAD_DIM]
            float* __restrict__ part_log2,        // [parts, heads], base 2; -inf if nothing was seen
            int part_tokens,                      // 0: parts of equal size
            int group, int window, int chunk, int causal, float scale, float cap) {
  constexpr int ROWS = WARPS * STRIPS * 16, CHUNKS = Tile<HEAD_DIM>::CHUNKS, THREADS = WARPS * 32;
  static_assert(PAGE % TILE == 0 && TILE % 16 == 0, "a tile lies in one page");
  extern __shared__ __align__(16) unsigned char smem[];
  T* const q_tile = reinterpret_cast<T*>(smem);
  T* const ring = q_tile + ROWS * HEAD_DIM;  // two stages of a tile of K and one of V

  const int sequence = SPLIT ? blockIdx.z / most_splits : blockIdx.z;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int count = counts[sequence], length = lengths[sequence], heads = kv_heads * group;
  // The last rows see the most keys, so their blocks start first.
  const int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS;
  if (first_row >= count * group) return;
  const int past = length - count;
  const int first_position = past + first_row / group;
  const int last_position = min(past + (first_row + ROWS - 1) / group, length - 1);
  const int visible_begin = first_visible(first_position, window, chunk);
  const int visible_end = causal ? last_position + 1 : length;
  int first_token = visible_begin / TILE * TILE, end_token = visible_end;  // the range of tiles
  if constexpr (SPLIT) {
    const int split = blockIdx.z % most_splits, count_of_splits = splits[sequence];
    if (split >= count_of_splits) return;
    if (part_tokens > 0) {
      const int begin = (first_visible(past, window, chunk) / part_tokens + split) * part_tokens;
      first_token = max(first_token, begin);
      end_token = min(begin + part_tokens, visible_end);
    } else {
      const int tiles = (visible_end - first_token + TILE - 1) / TILE;
      // 32 bits hold tiles * splits for 500 million tokens.
      end_token = min(first_token + tiles * (split + 1) / count_of_splits * TILE, visible_end);
      first_token += tiles * split / count_of_splits * TILE;
    }
  }
  const HeadPages<T, HEAD_DIM, PAGE, KV> pages(pool, page_stride, layer_offset, static_scales,
                                               tables + sequence * table_stride, kv_head, kv_heads);
  const int first_query = rows[sequence];
  auto query_index = [&](int row) {
    return static_cast<long long>(first_query + row / group) * heads + kv_head * group + row % group;
  };

  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool wanted = first_row + row < count * group;
    const T* const from = queries + (wanted ? query_index(first_row + row) * HEAD_DIM + chunk * 8 : 0);
    ptx::cp_async16(q_tile + Tile<HEAD_DIM>::at(row, chunk), from, wanted);
  }
  auto load = [&](int token) {
    const auto from = pages.rows(pages.page_of(token), token);
    T* const k_tile = ring + token / TILE % 2 * (2 * TILE * HEAD_DIM);
    T* const v_tile = k_tile + TILE * HEAD_DIM;
    // A constant number of rounds, so that they are unrolled without a check each.
#pragma unroll KV::UNROLL
    for (int round = 0; round < (TILE * CHUNKS + THREADS - 1) / THREADS; round++) {
      const int i = round * THREADS + static_cast<int>(threadIdx.x);
      if (TILE * CHUNKS % THREADS != 0 && i >= TILE * CHUNKS) break;
      const int row = i / CHUNKS, chunk = i % CHUNKS, place = Tile<HEAD_DIM>::at(row, chunk);
      // Tokens that no row sees become zeros: their memory may hold NaN, and a weight of zero times NaN is NaN.
      const bool wanted = token + row >= visible_begin && token + row < end_token;
      from.copy(k_tile + place, v_tile + place, row, chunk, wanted);
    }
    ptx::cp_async_commit();
  };
  if (!SPLIT || first_token < end_token) load(first_token);  // a part may be empty

  // A lane holds two rows of every strip, lane / 4 and lane / 4 + 8.
  auto row_of = [&](int strip, int half) {
    return first_row + (warp * STRIPS + strip) * 16 + half * 8 + lane / 4;
  };

  const Scores<CAPPED> scoring(scale, cap);
  const float scale_log2 = scoring.outer;
  float sums[STRIPS][HEAD_DIM / 8][4] = {};
  float maximum[STRIPS][2], denominator[STRIPS][2] = {};  // the maximum is that of the scores before scaling
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++) maximum[strip][0] = maximum[strip][1] = NEGATIVE_INFINITY;

  for (int token = first_token; token < end_token; token += TILE) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no thread needs the previous one any more
    if (token + TILE < end_token) load(token + TILE);
    const T* const k_tile = ring + token / TILE % 2 * (2 * TILE * HEAD_DIM);
    const T* const v_tile = k_tile + TILE * HEAD_DIM;

    float scores[STRIPS][TILE / 8][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
      unsigned q[STRIPS][4];
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
        ptx::ldmatrix_x4(q[strip], q_tile + Tile<HEAD_DIM>::at((warp * STRIPS + strip) * 16 + lane % 16,
                                                               step * 2 + lane / 16));
#pragma unroll
      for (int column = 0; column < TILE / 8; column += 2) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, k_tile + Tile<HEAD_DIM>::at(column * 8 + lane / 16 * 8 + lane % 8,
                                                        step * 2 + lane / 8 % 2));
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
          ptx::mma_m16n8k16<T>(scores[strip][column], q[strip], k[0], k[1]);
          ptx::mma_m16n8k16<T>(scores[strip][column + 1], q[strip], k[2], k[3]);
        }
      }
    }

    if constexpr (CAPPED)
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int column = 0; column < TILE / 8; column++)
#pragma unroll
          for (int i = 0; i < 4; i++) scores[strip][column][i] = scoring.of(scores[strip][column][i]);

    // Only tiles on the diagonal, at the window's edge or at the end of the keys need a mask.
    const bool edge = token + TILE > (causal ? first_position + 1 : end_token) ||
                      token < first_visible(last_position, window, chunk);
    if (edge) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // Rows beyond the last are computed like the last token's rows, and not written.
          const int position = min(past + row_of(strip, half) / group, length - 1);
          const int oldest = first_visible(position, window, chunk);
          const int newest = causal ? position : end_token - 1;
#pragma unroll
          for (int i = 0; i < TILE / 4; i++) {
            const int key = token + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (key > newest || key < oldest)
              scores[strip][i / 2][half * 2 + i % 2] = NEGATIVE_INFINITY;
          }
        }
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float most = maximum[strip][half];
#pragma unroll
        for (int column = 0; column < TILE / 8; column++)
          most = fmaxf(most, fmaxf(scores[strip][column][half * 2], scores[strip][column][half * 2 + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        // A row of a windowed layer may have seen no key yet: -inf - -inf would be NaN.
        const float seen = most == NEGATIVE_INFINITY ? 0.f : most, base = seen * scale_log2;
        // In parts it is exactly 1 if the maximum stays: the difference of two products is not 0 if one of them is
        // fused with it. Without parts a row's bits need not be the same in every step, and this takes a register less.
        const float shrink = SPLIT ? (maximum[strip][half] - seen) * scale_log2 : maximum[strip][half] * scale_log2 - base;
        const float rescale = ptx::exp2_approx(shrink);
        maximum[strip][half] = most;
        denominator[strip][half] *= rescale;
#pragma unroll
        for (int column = 0; column < TILE / 8; column++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float& score = scores[strip][column][half * 2 + i];
            score = ptx::exp2_approx(score * scale_log2 - base);
            denominator[strip][half] += score;
          }
#pragma unroll
        for (int column = 0; column < HEAD_DIM / 8; column++) {
          sums[strip][column][half * 2] *= rescale;
          sums[strip][column][half * 2 + 1] *= rescale;
        }
      }

    // The scores of 16 tokens, rounded to T, are already in the register layout of an mma operand.
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
      unsigned weights[STRIPS][4];
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const float* const pair = &scores[strip][2 * step + part / 2][part % 2 * 2];
          weights[strip][part] = Numbers<T>::narrow_pair(pair[0], pair[1]);
        }
#pragma unroll
      for (int column = 0; column < HEAD_DIM / 8; column += 2) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, v_tile + Tile<HEAD_DIM>::at(step * 16 + lane % 16, column + lane / 16));
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
          ptx::mma_m16n8k16<T>(sums[strip][column], weights[strip], v[0], v[1]);
          ptx::mma_m16n8k16<T>(sums[strip][column + 1], weights[strip], v[2], v[3]);
        }
      }
    }
  }

#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = denominator[strip][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = row_of(strip, half);
      if (row >= count * group) continue;
      if constexpr (SPLIT) {
        // A row may have seen nothing: its window begins later, or its part is empty.
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const long long part = first_parts[sequence] + static_cast<long long>(blockIdx.z % most_splits) * count +
                               row / group;
        const long long place = part * heads + kv_head * group + row % group;
        float* const to = part_out + place * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int column = 0; column < HEAD_DIM / 8; column++)
          *reinterpret_cast<float2*>(to + column * 8) =
              make_float2(sums[strip][column][half * 2] * inverse, sums[strip][column][half * 2 + 1] * inverse);
        if (lane % 4 == 0)
          part_log2[place] = maximum[strip][half] * scale_log2 + log2f(sum);
        continue;
      }
      const long long query = query_index(row);
      T* const to = out + query * HEAD_DIM + lane % 4 * 2;
#pragma unroll
      for (int column = 0; column < HEAD_DIM / 8; column++)
        *reinterpret_cast<unsigned*>(to + column * 8) = Numbers<T>::narrow_pair(
            sums[strip][column][half * 2] / sum, sums[strip][column][half * 2 + 1] / sum);
      if (lse != nullptr && lane % 4 == 0)
        lse[query] = (maximum[strip][half] * scale_log2 + log2f(sum)) * LN_2;
    }
}
