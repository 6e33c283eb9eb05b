// CUDA C++'s keywords, built-in variables and functions, as far as the kernels use them.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "machine.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__  // `extern __shared__ ... smem[]` is the one array that module.py defines

#define threadIdx (machine::block->current->thread)
#define blockIdx (machine::block->block)
#define blockDim (machine::block->block_dim)
#define gridDim (machine::block->grid_dim)

inline void __syncthreads(machine::Where where = machine::Where::current()) { machine::barrier(where); }

inline void __syncwarp(unsigned mask = 0xffffffffu, machine::Where where = machine::Where::current()) {
  char nothing;
  machine::release_warp();
  machine::collective("__syncwarp", mask, nothing, where, [](char**) {});
  machine::acquire_warp();
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, machine::Where where = machine::Where::current()) {
  struct Record {
    T mine, theirs;
    int flip;
  } record{value, value, flip};
  machine::collective("__shfl_xor_sync", mask, record, where, [](Record** records) {
    for (int lane = 0; lane < 32; lane++)
      if (records[lane] && records[lane ^ records[lane]->flip])
        records[lane]->theirs = records[lane ^ records[lane]->flip]->mine;
  });
  return record.theirs;
}

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float_as_int(float number) { return std::bit_cast<int>(number); }

template <class T, class U>
std::common_type_t<T, U> min(T a, U b) {
  return a < b ? a : b;
}
template <class T, class U>
std::common_type_t<T, U> max(T a, U b) {
  return a > b ? a : b;
}
