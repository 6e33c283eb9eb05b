// Quantised weights as they are packed (packed.cuh): their numbers, and products of a few rows of activations.
#include "packed.cuh"

#define PACKED_PARAMETERS                                                                                       \
  const unsigned char *__restrict__ codes, long long row_bytes, const unsigned char *__restrict__ scales,       \
      const unsigned char *__restrict__ zeros, const long long *__restrict__ groups, int width, int group,      \
      int block_rows, int scale_kind, int zero_kind, float zero
#define PACKED_TABLES {scales, zeros, groups, width, group, block_rows, scale_kind, zero_kind, zero}

// Writes rows of `columns` numbers, rounded to T: those that `rows` names, or all from `first` on if it is null.
// grid (rows), block THREADS.
template <class T, class FORMAT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    unpack(PACKED_PARAMETERS, const long long* __restrict__ rows, int first, T* __restrict__ out, int columns) {
  const Tables tables PACKED_TABLES;
  const long long row = rows != nullptr ? rows[blockIdx.x] : first + static_cast<long long>(blockIdx.x);
  T* const to = out + static_cast<long long>(blockIdx.x) * columns;
  for (int column = threadIdx.x * 8; column < columns; column += THREADS * 8) {
    const int left = min(8, columns - column);
    float numbers[8];
    FORMAT::eight(numbers, codes + row * row_bytes, column, left);
    tables.apply(numbers, row, column, left);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < left) to[column + i] = Numbers<T>::narrow(numbers[i]);
  }
}

// out[i][j] = x[i] · row first + j, for `count` rows of x, at most 16, and `rows` of the matrix, whose numbers are rounded
// to T. The order of a sum depends on the columns alone: lane l adds up the columns 8 l … 8 l + 7 of every 256, and
// shuffles add the lanes.
//
// Eight warps share the activations of 256 columns in shared memory; each decodes ROWS rows there once for all
// activations. grid (rows / (8 ROWS), up), block 256, dynamic shared memory 16 KiB.
template <class T, class FORMAT, int ROWS>
__global__ void __launch_bounds__(256, 2)
    multiply_packed(PACKED_PARAMETERS, int first, int rows, const T* __restrict__ x, int count, int columns,
                    T* __restrict__ out, long long out_stride) {
  constexpr int COLUMNS = 256, MOST = 16;
  extern __shared__ __align__(16) unsigned char smem[];
  float* const tile = reinterpret_cast<float*>(smem);
  // The halves of a lane's eight numbers are apart, so that 16-byte reads of neighbouring lanes meet no bank twice.
  auto place = [](int token, int column) {
    return token * COLUMNS + column / 4 % 2 * (COLUMNS / 2) + column / 8 * 4 + column % 4;
  };
  const Tables tables PACKED_TABLES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin_row = (blockIdx.x * 8 + warp) * ROWS;
  float sums[ROWS][MOST] = {};
  for (int begin = 0; begin < columns; begin += COLUMNS) {
    __syncthreads();  // all warps have read the activations before
    for (int i = threadIdx.x; i < count * COLUMNS; i += 256) {
      const int token = i / COLUMNS, column = begin + i % COLUMNS;
      tile[place(token, i % COLUMNS)] =
          column < columns ? Numbers<T>::widen(x[static_cast<long long>(token) * columns + column]) : 0.f;
    }
    __syncthreads();  // the activations are there
    const int column = begin + lane * 8, left = min(8, columns - column);
    if (left <= 0) continue;
    float numbers[ROWS][8];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      const long long row = first + min(begin_row + j, rows - 1);
      FORMAT::eight(numbers[j], codes + row * row_bytes, column, left);
      tables.apply(numbers[j], row, column, left);
#pragma unroll
      for (int i = 0; i < 8; i++)
        numbers[j][i] = i < left ? Numbers<T>::widen(Numbers<T>::narrow(numbers[j][i])) : 0.f;
    }
#pragma unroll
    for (int token = 0; token < MOST; token++) {
      if (token >= count) continue;
      const float4 low = *reinterpret_cast<const float4*>(tile + place(token, lane * 8));
      const float4 high = *reinterpret_cast<const float4*>(tile + place(token, lane * 8 + 4));
      const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < ROWS; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[j][token] += numbers[j][i] * part[i];
    }
  }
#pragma unroll
  for (int token = 0; token < MOST; token++) {
    if (token >= count) continue;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      float sum = sums[j][token];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      if (lane == 0 && begin_row + j < rows) out[token * out_stride + begin_row + j] = Numbers<T>::narrow(sum);
    }
  }
}
