// Products of activations with a transposed matrix, whose rows have the same bits in every product.
//
// out[i][j] = x[i] · weight[j], summed in float32 from the first sixteen columns to the last, by tensor cores. Nothing
// else decides the order: neither how many rows there are, nor where a row lies in its tile. So all instances compute
// the same bits, and sums are not divided among blocks.
//
// A block computes ROWS × PRODUCTS numbers, a warp WARP_ROWS × WARP_PRODUCTS of them. The tiles of 64 columns pass
// through a ring of STAGES stages. Few rows (a decode step) take small blocks with a deep ring, because reading the
// matrix takes the time; many rows take large ones.
//
// grid (ceil(products / PRODUCTS), ceil(rows / ROWS)), block 32 for each warp, dynamic shared memory
// STAGES * (ROWS + PRODUCTS) * 128 bytes. Rows of x and weight begin at multiples of 16 bytes, so `columns` is a
// multiple of 8.
#include <ptx.cuh>

#include "numbers.cuh"
#include "tile.cuh"

template <class T, int ROWS, int PRODUCTS, int WARP_ROWS, int WARP_PRODUCTS, int STAGES>
__global__ void __launch_bounds__(ROWS / WARP_ROWS * PRODUCTS / WARP_PRODUCTS * 32)
    multiply_rows(const T* __restrict__ x, int rows, const T* __restrict__ weight, int products, int columns,
                  T* __restrict__ out) {
  constexpr int COLUMNS = 64, CHUNKS = COLUMNS / 8, ACROSS = PRODUCTS / WARP_PRODUCTS;
  constexpr int THREADS = ROWS / WARP_ROWS * ACROSS * 32, STAGE = (ROWS + PRODUCTS) * COLUMNS;
  static_assert(WARP_ROWS % 16 == 0 && WARP_PRODUCTS % 16 == 0, "an ldmatrix reads four 8 × 8 matrices");
  extern __shared__ __align__(16) unsigned char smem[];
  T* const ring = reinterpret_cast<T*>(smem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.y * ROWS, first_product = blockIdx.x * PRODUCTS;
  const int warp_row = warp / ACROSS * WARP_ROWS, warp_product = warp % ACROSS * WARP_PRODUCTS;
  const int tiles = (columns + COLUMNS - 1) / COLUMNS;

  // The tile of x, and below it that of the matrix. What lies outside of either becomes zeros.
  auto load = [&](int tile) {
    T* const stage = ring + tile % STAGES * STAGE;
    for (int i = threadIdx.x; i < (ROWS + PRODUCTS) * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, column = tile * COLUMNS + chunk * 8;
      const bool of_x = row < ROWS;
      const int from_row = of_x ? first_row + row : first_product + row - ROWS;
      const bool wanted = tile < tiles && column < columns && from_row < (of_x ? rows : products);
      const long long place = wanted ? static_cast<long long>(from_row) * columns + column : 0;
      ptx::cp_async16(stage + Tile<COLUMNS>::at(row, chunk), (of_x ? x : weight) + place, wanted);
    }
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) load(tile);

  float sums[WARP_ROWS / 16][WARP_PRODUCTS / 8][4] = {};
  for (int tile = 0; tile < tiles; tile++) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncthreads();  // this tile has arrived, and no warp needs the one before
    load(tile + STAGES - 1);
    const T* const stage = ring + tile % STAGES * STAGE;
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
      unsigned a[WARP_ROWS / 16][4];
#pragma unroll
      for (int strip = 0; strip < WARP_ROWS / 16; strip++)
        ptx::ldmatrix_x4(a[strip],
                         stage + Tile<COLUMNS>::at(warp_row + strip * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int pair = 0; pair < WARP_PRODUCTS / 16; pair++) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, stage + Tile<COLUMNS>::at(ROWS + warp_product + pair * 16 + lane / 16 * 8 + lane % 8,
                                                      step * 2 + lane / 8 % 2));
#pragma unroll
        for (int strip = 0; strip < WARP_ROWS / 16; strip++) {
          ptx::mma_m16n8k16<T>(sums[strip][pair * 2], a[strip], b[0], b[1]);
          ptx::mma_m16n8k16<T>(sums[strip][pair * 2 + 1], a[strip], b[2], b[3]);
        }
      }
    }
  }

  // A lane holds rows lane / 4 and lane / 4 + 8 of each strip, and two neighbours of each eight products.
#pragma unroll
  for (int strip = 0; strip < WARP_ROWS / 16; strip++)
#pragma unroll
    for (int eight = 0; eight < WARP_PRODUCTS / 8; eight++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_row + warp_row + strip * 16 + i / 2 * 8 + lane / 4;
        const int product = first_product + warp_product + eight * 8 + lane % 4 * 2 + i % 2;
        if (row < rows && product < products)
          out[static_cast<long long>(row) * products + product] = Numbers<T>::narrow(sums[strip][eight][i]);
      }
}
