// Copy many small fragments, such as one layer's part of many pages, to or from pinned host memory or within the
// pool. The copy engines are faster for large pieces and need no SM. Below some size, which must be measured at
// start, one launch of this kernel is faster than thousands of descriptors.
//
// One warp per fragment, 4 x 16 bytes in flight per lane. Any grid and any block of whole warps: the fragments are
// distributed over them. Addresses and `bytes` are multiples of 16. Host memory must be pinned and mapped.
#include <ptx.cuh>

__global__ void __launch_bounds__(512, 1)
    page_copy(const unsigned long long* __restrict__ to,    // [fragments], addresses
              const unsigned long long* __restrict__ from,  // [fragments]
              int fragments, int bytes) {
  const int lane = threadIdx.x % 32, vectors = bytes / 16;
  const int warps = gridDim.x * (blockDim.x / 32);
  for (int fragment = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; fragment < fragments; fragment += warps) {
    const uint4* const source = reinterpret_cast<const uint4*>(from[fragment]);
    uint4* const target = reinterpret_cast<uint4*>(to[fragment]);
    int i = lane;
    for (; i + 96 < vectors; i += 128) {
      const uint4 a = ptx::load_streaming(source + i), b = ptx::load_streaming(source + i + 32);
      const uint4 c = ptx::load_streaming(source + i + 64), d = ptx::load_streaming(source + i + 96);
      ptx::store_streaming(target + i, a);
      ptx::store_streaming(target + i + 32, b);
      ptx::store_streaming(target + i + 64, c);
      ptx::store_streaming(target + i + 96, d);
    }
    for (; i < vectors; i += 32) ptx::store_streaming(target + i, ptx::load_streaming(source + i));
  }
}
