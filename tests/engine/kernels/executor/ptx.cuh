// The functions of the kernels' ptx.cuh, on the host. Register layouts are those of the PTX manual.
#pragma once
#include "executor.h"

namespace ptx {

inline void check_aligned(const char* what, const void* pointer, machine::Where where) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16)
    machine::fail(std::string(what) + ": misaligned address, " + machine::at(*machine::block->current, where));
}

inline void land(const machine::Copy& copy) {
  if (copy.from)
    memcpy(copy.to, copy.from, 16);
  else
    memset(copy.to, 0, 16);
}

inline void cp_async16(void* shared, const void* global, bool wanted,
                       machine::Where where = machine::Where::current()) {
  check_aligned("cp.async", shared, where);
  if (wanted) check_aligned("cp.async", global, where);
  const machine::Copy copy{shared, wanted ? global : nullptr};
  if (machine::block->copies_land_at_once) land(copy);
  machine::block->current->open_copies.push_back(copy);
}

inline void cp_async_commit() {
  machine::Fiber& fiber = *machine::block->current;
  fiber.groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

template <int PENDING>
void cp_async_wait() {
  auto& groups = machine::block->current->groups;
  while (groups.size() > PENDING) {
    if (!machine::block->copies_land_at_once)
      for (const machine::Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

// Each lane reads the row that it names itself, when it arrives: what others have yet to write it does not see.
struct MatrixRecord {
  uintptr_t address;
  uint16_t row[8];
  unsigned fragments[4];
};

inline void check_banks(MatrixRecord** lanes, machine::Where where) {
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned banks = 0;
    for (int row = 0; row < 8; row++) banks |= 1u << (lanes[matrix * 8 + row]->address / 16 % 8);
    if (banks != 0xFF)
      machine::fail("ldmatrix: bank conflict, " + machine::at(*machine::block->current, where));
  }
}

template <bool TRANSPOSED>
void ldmatrix(const char* name, unsigned (&fragments)[4], const void* row, machine::Where where) {
  check_aligned(name, row, where);
  MatrixRecord record{reinterpret_cast<uintptr_t>(row), {}, {}};
  memcpy(record.row, row, 16);
  machine::collective(name, 0xffffffffu, record, where, [where](MatrixRecord** lanes) {
    check_banks(lanes, where);
    for (int matrix = 0; matrix < 4; matrix++)
      for (int lane = 0; lane < 32; lane++) {
        unsigned pair = 0;
        for (int i = 0; i < 2; i++) {
          const int along = lane % 4 * 2 + i, across = lane / 4;
          const int from = TRANSPOSED ? along : across, column = TRANSPOSED ? across : along;
          pair |= static_cast<unsigned>(lanes[matrix * 8 + from]->row[column]) << (16 * i);
        }
        lanes[lane]->fragments[matrix] = pair;
      }
  });
  memcpy(fragments, record.fragments, sizeof record.fragments);
}

inline void ldmatrix_x4(unsigned (&fragments)[4], const void* row, machine::Where where = machine::Where::current()) {
  ldmatrix<false>("ldmatrix", fragments, row, where);
}

inline void ldmatrix_x4_trans(unsigned (&fragments)[4], const void* row,
                              machine::Where where = machine::Where::current()) {
  ldmatrix<true>("ldmatrix.trans", fragments, row, where);
}

// Exact, as NVIDIA's function for the host, which takes longer.
template <class T>
float widen(unsigned bits) {
  if constexpr (std::is_same_v<T, __half>) {
    const float scaled = std::bit_cast<float>((bits & 0x7FFF) << 13) * 0x1p112f;
    const unsigned not_finite = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
    return std::bit_cast<float>(std::bit_cast<unsigned>(scaled) | not_finite | (bits & 0x8000) << 16);
  } else {
    return std::bit_cast<float>(bits << 16);
  }
}

struct MmaRecord {
  float* sums;
  unsigned a[4], b[2];
};

typedef float Row __attribute__((vector_size(32)));  // an operator is for all eight columns

template <class T>
void multiply(MmaRecord** lanes) {
  float a[16][16];
  Row b[16], sums[16];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 2; i++) {
      const int group = lane / 4, column = lane % 4 * 2 + i;
      for (int part = 0; part < 4; part++)
        a[group + part % 2 * 8][column + part / 2 * 8] = widen<T>(lanes[lane]->a[part] >> (16 * i));
      for (int part = 0; part < 2; part++) {
        b[column + part * 8][group] = widen<T>(lanes[lane]->b[part] >> (16 * i));
        sums[group + part * 8][column] = lanes[lane]->sums[part * 2 + i];
      }
    }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++) sums[row] += a[row][k] * b[k];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) lanes[lane]->sums[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

template <class T>
void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                  machine::Where where = machine::Where::current()) {
  MmaRecord record{sums, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  machine::collective("mma", 0xffffffffu, record, where, multiply<T>);
}

inline float exp2_approx(float x) { return exp2f(x); }

inline uint4 load_streaming(const uint4* global) { return *global; }

inline void store_streaming(uint4* global, uint4 value) { *global = value; }

}  // namespace ptx
