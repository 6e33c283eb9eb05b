// A tile: rows of HEAD_DIM 16-bit numbers in shared memory, swizzled so that ldmatrix has no bank conflicts.
//
// ldmatrix reads 8 rows of 16 bytes at a time. Shared memory has 32 banks of 4 bytes, so these 8 pieces are read at
// once only if they lie in different sixteenths of 128 bytes. In plain rows of 128 or 256 bytes a column would lie in
// one of them. So the 16-byte chunks of row r are permuted by r: chunk c goes to place c XOR phase(r). Row widths
// that are not a multiple of 128 bytes already spread over some banks. The XOR then only has to reach the others, and
// must stay within the row.
#pragma once

template <int HEAD_DIM>
struct Tile {
  static_assert(HEAD_DIM % 16 == 0, "an mma step takes 16 of a head's dimensions");
  static constexpr int CHUNKS = HEAD_DIM / 8;  // 16-byte chunks of a row

  static __device__ __forceinline__ int phase(int row) {
    if constexpr (CHUNKS % 8 == 0) return row & 7;
    if constexpr (CHUNKS % 8 == 4) return (row >> 1) & 3;
    return (row >> 2) & 1;
  }

  // The place of chunk `chunk` of row `row`, in numbers from the tile's start.
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * HEAD_DIM + ((chunk ^ phase(row)) << 3);
  }
};
