// What queries and keys make of one another, where models differ: which keys a query sees, and what its scores are.
#pragma once
#include <ptx.cuh>

#include "numbers.cuh"

// The first token that the one at `position` sees: of the last `window`, of those of its attention chunk (`chunk`
// tokens long, counted from the sequence's first), or of all (both 0). Pages before it may be missing.
__device__ __forceinline__ int first_visible(int position, int window, int chunk) {
  if (chunk > 0) return position - position % chunk;
  return window > 0 ? max(position - window + 1, 0) : 0;
}

// How products become the scores that go into a softmax, in base 2: in two factors, between which a score x may be
// capped, smoothly, to cap * tanh(x / cap).
template <bool CAPPED>
struct Scores {
  float inner, outer;

  __device__ __forceinline__ Scores(float scale, float cap)
      : inner(CAPPED ? scale / cap : 1.f), outer((CAPPED ? cap : scale) * LOG2_E) {}

  // Of a product; `outer` is still to be multiplied by.
  __device__ __forceinline__ float of(float product) const {
    if constexpr (!CAPPED) return product;
    // tanh; what cancels for small x is 2^-24, and the caps are tens.
    return 1.f - __fdividef(2.f, 1.f + ptx::exp2_approx(product * inner * (2.f * LOG2_E)));
  }
};
