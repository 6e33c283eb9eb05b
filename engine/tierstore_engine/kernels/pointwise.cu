// A decoder's operations between matrix products and attention: adding and normalising a residual, and the gate of an
// MLP. In torch each takes several launches, which are most of a decode step.
//
// Every step that torch rounds is rounded here. So results differ from torch's only where another order of summation,
// or another exponential, changes the last bit of a number. A row's bits depend on that row alone.
#include <ptx.cuh>

#include "numbers.cuh"

// total = hidden + added (without `added`: hidden, and total is not written), normed = RMSNorm(total) * weight.
//
// grid (rows), block of THREADS; `width` is a multiple of 8. The rows are contiguous.
template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS)
    add_norm(const T* __restrict__ hidden, const T* __restrict__ added, const T* __restrict__ weight, T* total,
             T* __restrict__ normed, int width, float epsilon) {
  constexpr int WARPS = THREADS / 32;
  extern __shared__ __align__(16) unsigned char smem[];
  float* const of_warps = reinterpret_cast<float*>(smem);  // [WARPS]: sums of squares
  const long long row = static_cast<long long>(blockIdx.x) * width;
  auto vector = [&](const T* numbers, long long first) { return *reinterpret_cast<const uint4*>(numbers + first); };

  float squares = 0.f;
  for (int i = threadIdx.x * 8; i < width; i += THREADS * 8) {
    float mine[8];
    widen8<T>(mine, vector(hidden, row + i));
    if (added != nullptr) {
      float more[8];
      widen8<T>(more, vector(added, row + i));
#pragma unroll
      for (int k = 0; k < 8; k++) mine[k] += more[k];
      const uint4 rounded = narrow8<T>(mine);
      *reinterpret_cast<uint4*>(total + row + i) = rounded;
      widen8<T>(mine, rounded);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) squares += mine[k] * mine[k];
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, other);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += of_warps[warp];
  const float scale = 1.f / sqrtf(sum / width + epsilon);

  const T* const from = added != nullptr ? total : hidden;  // each thread reads its own writes
  for (int i = threadIdx.x * 8; i < width; i += THREADS * 8) {
    float mine[8], weights[8];
    widen8<T>(mine, vector(from, row + i));
    widen8<T>(weights, vector(weight, i));
#pragma unroll
    for (int k = 0; k < 8; k++) mine[k] = weights[k] * Numbers<T>::widen(Numbers<T>::narrow(mine[k] * scale));
    *reinterpret_cast<uint4*>(normed + row + i) = narrow8<T>(mine);
  }
}

// out = SiLU(gate) * up, for rows of gate_up [rows, 2 * width]: a row's gates, then its ups.
//
// grid (rows), any block; `width` is a multiple of 8. The rows are contiguous.
template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS)
    silu_mul(const T* __restrict__ gate_up, T* __restrict__ out, int width) {
  const T* const gate = gate_up + static_cast<long long>(blockIdx.x) * 2 * width;
  T* const row = out + static_cast<long long>(blockIdx.x) * width;
  for (int i = threadIdx.x * 8; i < width; i += THREADS * 8) {
    float gates[8], ups[8];
    widen8<T>(gates, *reinterpret_cast<const uint4*>(gate + i));
    widen8<T>(ups, *reinterpret_cast<const uint4*>(gate + width + i));
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const float opened = gates[k] / (1.f + ptx::exp2_approx(-gates[k] * LOG2_E));
      gates[k] = Numbers<T>::widen(Numbers<T>::narrow(opened)) * ups[k];
    }
    *reinterpret_cast<uint4*>(row + i) = narrow8<T>(gates);
  }
}
