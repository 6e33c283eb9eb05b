// Every inline-PTX instruction of the kernels, each in a plain function. No other file has `asm`.
//
// The tests execute the kernels on the CPU. There a file of the same name comes first and gives these functions a
// host body. A function that is added here must be added in tests/engine/kernels/executor/ptx.cuh as well.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes from global to shared memory without a register in between (sm_80). Both ends are 16-byte aligned. If
// `wanted` is false, nothing is read and zeros are written.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

// The calling thread's copies since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Wait until at most PENDING of the calling thread's groups are unfinished. Copies of other threads are visible only
// after a barrier as well.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit numbers from shared memory into the warp's registers. Lane 8 i + r names row
// r (16 bytes) of matrix i; lane l receives elements (l / 4, 2 (l % 4)) and the one right of it of each.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same with each matrix transposed: lane l receives elements (2 (l % 4), l / 4) and the one below it.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

// sums[16x8] += a[16x16] b[16x8] by the whole warp; T is __half or __nv_bfloat16, sums are float.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&sums)[4], const unsigned (&a)[4], unsigned b0,
                                                     unsigned b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&sums)[4], const unsigned (&a)[4],
                                                            unsigned b0, unsigned b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x to about 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Load 16 bytes that are read once, without evicting data from L1.
__device__ __forceinline__ uint4 load_streaming(const uint4* global) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global)
               : "memory");
  return value;
}

// Store 16 bytes that this device does not read soon.
__device__ __forceinline__ void store_streaming(uint4* global, uint4 value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(global), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

}  // namespace ptx
