// Executing CUDA C++ on the CPU, for tests. Everything a kernel's text needs; C++20, Linux, x86-64 or aarch64.
//
// A kernel file is compiled, unchanged, by g++ behind this header and then run without a GPU, a driver or nvcc.
// The point is not speed but judgement: what a GPU forgives, depends on luck for, or answers with silence is an
// error here, with the block, the thread and the line.
//
// How it works
//   Every CUDA thread is a fiber with a stack of its own (machine.cc); one block runs at a time. A fiber runs
//   until it must wait, at a barrier or for the other lanes of its warp, and then another one is picked. Who is
//   picked is decided by a seed, so a schedule can be repeated.
//   A warp collective (shuffle, ldmatrix, mma: language.h, ptx.cuh) leaves a record per lane; the last lane to
//   arrive computes the result for all of them and lets them go on. An mma is a real 16x8x16 product in float.
//   The number formats are those of NVIDIA's own headers, whose host paths round exactly as the device does.
//
// What is caught, and by what
//   Reading or writing out of bounds: arrays end at a page that may not be touched (memory.py).
//   Uninitialised shared memory: filled with 0xFF, a NaN in every format, before each block. Written past its
//   end: the bytes behind it are looked at after each block. Uninitialised locals: filled with a pattern.
//   A missing barrier: seeds. 0 runs all threads in order; 1 in random order; 2 and 3 let one warp run as far
//   ahead of the others as the barriers allow, 3 and 1 with the blocks in reverse.
//   A missing or too weak cp_async_wait: with even seeds a copy lands when its issuer waits for it and not
//   before; with odd seeds it lands at once, which catches a buffer that is overwritten too early.
//   Threads that part ways: barriers reached at different lines, lanes in different collectives, a mask that
//   names a lane which has exited, deadlocks.
//   Bank conflicts of ldmatrix; misaligned vectors; integer overflow (the last two by UBSan's traps).
//   Races, with g++ -fsanitize=thread: each fiber is a TSan thread. Only barriers and __syncwarp order memory;
//   shuffles, ldmatrix and mma do not, as on the device. Slow, but finds a race whatever the order was.
//
// What is not
//   Speed: occupancy, coalescing, bank conflicts of plain accesses. The memory model between blocks (they run
//   one by one): kernels here do not communicate between blocks. Approximate arithmetic: exp2 is exact here, and
//   an mma adds in another order. And the register layouts of ldmatrix and mma are those of the PTX manual: they
//   have yet to be compared with a GPU's.
//
// Conventions a kernel must keep: dynamic shared memory only, declared as
//   extern __shared__ __align__(16) unsigned char smem[];
// and all inline PTX behind the functions of ptx.cuh, which is found in this folder first.
#pragma once
#include "language.h"
#include "machine.h"
