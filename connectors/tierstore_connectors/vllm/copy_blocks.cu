// Copy a page's blocks between vLLM's KV tensors and a page in GPU memory, in one launch. A piece is the part of
// one block in one plane (see layout.py): a page of 32 layers has hundreds of pieces of a few KiB.
//
// One warp copies a piece, with 4 x 16 bytes in flight per lane. The grid may have any size, and a CUDA block any
// number of whole warps. Addresses, strides and sizes are multiples of 16 bytes.

__global__ void __launch_bounds__(512)
    copy_blocks(const unsigned long long* __restrict__ planes,  // [planes][4]: address, bytes between two blocks,
                                                                // bytes per block, offset of the plane in the page
                const int* __restrict__ blocks,                 // [count], the blocks of the page
                unsigned char* page, int num_planes, int count, int into_page) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  for (int piece = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; piece < num_planes * count; piece += warps) {
    const unsigned long long* const plane = planes + piece / count * 4;
    const int at = piece % count, block = blocks[at];
    if (!into_page && block == 0) continue;  // block 0 is vLLM's placeholder for "no block"
    uint4* const theirs = reinterpret_cast<uint4*>(plane[0] + block * plane[1]);
    uint4* const ours = reinterpret_cast<uint4*>(page + plane[3] + at * plane[2]);
    const uint4* const source = into_page ? theirs : ours;
    uint4* const target = into_page ? ours : theirs;
    const int vectors = static_cast<int>(plane[2] / 16);
    int i = lane;
    for (; i + 96 < vectors; i += 128) {
      const uint4 a = source[i], b = source[i + 32], c = source[i + 64], d = source[i + 96];
      target[i] = a;
      target[i + 32] = b;
      target[i + 64] = c;
      target[i + 96] = d;
    }
    for (; i < vectors; i += 32) target[i] = source[i];
  }
}
