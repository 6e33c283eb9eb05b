// Kernels with one fault each, and one without: what the executor must tell apart (test_executor.py).
#include <ptx.cuh>

__global__ void out_of_bounds(float* numbers) { numbers[threadIdx.x] = 1.f; }

__global__ void barrier_missing(float* reversed) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  shared[threadIdx.x] = threadIdx.x;
  reversed[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// The second round overwrites what others have yet to read.
__global__ void second_barrier_missing(float* reversed) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  for (int round = 0; round < 2; round++) {
    shared[threadIdx.x] = threadIdx.x + 1000 * round;
    __syncthreads();
    if (round == 0) reversed[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
  }
}

// Shuffles order no memory: only lanes that happen to run in step get away with this.
__global__ void shuffle_for_barrier(float* reversed) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  shared[threadIdx.x] = threadIdx.x;
  const int own = __shfl_xor_sync(0xffffffffu, static_cast<int>(threadIdx.x), 0);
  reversed[own] = shared[own / 32 * 32 + 31 - own % 32];
}

__global__ void no_fault(float* reversed) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  reversed[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void barriers_diverge(float* numbers) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    numbers[0] = 1.f;
    __syncthreads();
  }
}

__global__ void deadlock(float* numbers) {
  if (threadIdx.x % 32 == 0) __syncwarp();
  else __syncthreads();
}

__global__ void collectives_differ(float* numbers) {
  if (threadIdx.x < 16) __syncwarp();
  else numbers[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
}

__global__ void exited_lane(float* numbers) {
  if (threadIdx.x == 31) return;
  __syncwarp(0x7fffffffu);
  numbers[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
}

__global__ void shared_overflow(float* numbers) {
  extern __shared__ __align__(16) unsigned char smem[];
  reinterpret_cast<float*>(smem)[threadIdx.x] = 1.f;
  numbers[threadIdx.x] = 1.f;
}

__global__ void uninitialised_shared(float* numbers) {
  extern __shared__ __align__(16) unsigned char smem[];
  numbers[threadIdx.x] = reinterpret_cast<float*>(smem)[threadIdx.x];
}

__global__ void misaligned(float* numbers) {
  numbers[threadIdx.x] = reinterpret_cast<const float4*>(numbers + 1)->x;
}

__global__ void integer_overflow(float* numbers) {
  const int large = 1 << 30;
  numbers[threadIdx.x] = (large + static_cast<int>(threadIdx.x)) * 4;
}

__global__ void bank_conflict(float* numbers) {
  extern __shared__ __align__(16) unsigned char smem[];
  unsigned fragments[4];
  ptx::ldmatrix_x4(fragments, smem + threadIdx.x * 128);
  numbers[threadIdx.x] = fragments[0];
}

// The last copy is waited for too late, or (with WAIT) in time.
template <bool WAIT>
__global__ void copy_wait(float* numbers, const float* source) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  ptx::cp_async16(shared + threadIdx.x * 4, source + threadIdx.x * 4, true);
  ptx::cp_async_commit();
  if (WAIT) ptx::cp_async_wait<0>();
  else ptx::cp_async_wait<1>();
  numbers[threadIdx.x] = shared[threadIdx.x * 4];
}

// The buffer of a copy that has not been read yet is overwritten by the next one.
__global__ void copy_too_early(float* numbers, const float* source) {
  extern __shared__ __align__(16) unsigned char smem[];
  float* const shared = reinterpret_cast<float*>(smem);
  ptx::cp_async16(shared + threadIdx.x * 4, source + threadIdx.x * 4, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::cp_async16(shared + threadIdx.x * 4, source + (threadIdx.x + 32) * 4, true);
  ptx::cp_async_commit();
  numbers[threadIdx.x] = shared[threadIdx.x * 4];
}
