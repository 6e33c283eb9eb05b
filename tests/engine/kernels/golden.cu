// What every lane gets from ldmatrix, mma and the shuffle: the layouts that all kernels rest on (test_golden.py).
#include <ptx.cuh>

// One warp. `tiles` are eight 8x8 matrices; `seen` takes 16 words per lane.
template <class T>
__global__ void golden(const uint4* __restrict__ tiles, unsigned* __restrict__ seen) {
  extern __shared__ __align__(16) unsigned char smem[];
  uint4* const shared = reinterpret_cast<uint4*>(smem);
  const int lane = threadIdx.x;
  shared[lane] = tiles[lane];
  shared[lane + 32] = tiles[lane + 32];
  __syncthreads();
  unsigned plain[4], transposed[4];
  ptx::ldmatrix_x4(plain, shared + lane);
  ptx::ldmatrix_x4_trans(transposed, shared + lane + 32);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  ptx::mma_m16n8k16<T>(sums, plain, transposed[0], transposed[1]);
  for (int i = 0; i < 4; i++) {
    seen[lane * 16 + i] = plain[i];
    seen[lane * 16 + 4 + i] = transposed[i];
    seen[lane * 16 + 8 + i] = *reinterpret_cast<const unsigned*>(&sums[i]);
    seen[lane * 16 + 12 + i] = __shfl_xor_sync(0xffffffffu, plain[0], 1 << i);
  }
}
