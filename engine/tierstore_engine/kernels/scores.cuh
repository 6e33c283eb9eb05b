// The parts of attention in which models differ: which keys a query sees, and what its scores are.
#pragma once
#include <ptx.cuh>

#include "numbers.cuh"

// The first token that the token at `position` sees: of the last `window`, of its attention chunk (`chunk` tokens
// long, counted from the sequence's first), or of all (both 0). Pages before it may be missing.
__device__ __forceinline__ int first_visible(int position, int window, int chunk) {
  if (chunk > 0) return position - position % chunk;
  return window > 0 ? max(position - window + 1, 0) : 0;
}

// Turn products into the scores of a softmax, in base 2. There are two factors, and between them a score x may be
// capped smoothly to cap * tanh(x / cap).
template <bool CAPPED>
struct Scores {
  float inner, outer;

  __device__ __forceinline__ Scores(float scale, float cap)
      : inner(CAPPED ? scale / cap : 1.f), outer((CAPPED ? cap : scale) * LOG2_E) {}

  // The score of a product, which must still be multiplied by `outer`.
  __device__ __forceinline__ float of(float product) const {
    if constexpr (!CAPPED) return product;
    // tanh. The cancellation error for small x is 2^-24, and caps are in the tens.
    return 1.f - __fdividef(2.f, 1.f + ptx::exp2_approx(product * inner * (2.f * LOG2_E)));
  }
};
