// The machine that blocks run on: fibers in warps in a block, what they can wait for, and how a kernel is launched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <vector_functions.h>
#include <vector_types.h>

namespace machine {

using Where = std::source_location;

constexpr unsigned MAX_SHARED_BYTES = 227 * 1024;  // what a block can have on sm_90

struct Copy {  // one cp.async that has not landed
  void* to;
  const void* from;  // null: zeros
};

enum class State : uint8_t { ready, at_barrier, at_collective, finished };

struct Fiber;

struct Warp {
  unsigned lanes_there = 0;  // the last warp of a block may be short
  unsigned live = 0;         // lanes that have not returned
  unsigned arrived = 0;      // lanes waiting in a collective
  unsigned ready = 0;
  Fiber* lanes[32] = {};
  char order[64];  // what TSan is told about __syncwarp
};

struct Fiber {
  void* stack_pointer;
  void* tsan;
  uint3 thread;
  unsigned index, lane;
  Warp* warp;
  State state;
  // What it waits for, and where in the kernel:
  const char* what;
  Where where;
  unsigned mask;  // of a collective
  void* record;
  // Its cp.async copies: those of the open group, and the committed groups that have not landed, oldest first.
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> groups;
};

// What the kernel's built-in variables and the header functions see of the running block.
struct Block {
  uint3 block{};
  dim3 block_dim, grid_dim;
  Fiber* current = nullptr;
  unsigned char* shared = nullptr;
  bool copies_land_at_once = false;
};
extern Block* block;

struct Launch {
  unsigned grid[3], threads[3], shared_bytes;
  unsigned long long seed;
  unsigned char* shared;  // MAX_SHARED_BYTES
  void (*body)(void*);    // the kernel with its arguments
  void* arguments;
};

// Runs all blocks. Returns 0, or 1 with a message: the first error, after which nothing more is run.
int run(const Launch& launch, char* message, size_t message_bytes);

// Ends the launch with an error. Called by the kernel's own functions; the fibers are abandoned.
[[noreturn]] void fail(const std::string& message);
std::string at(const Fiber& fiber, const Where& where);

void barrier(Where where);
// A lane arrives at a collective. True for the last of `mask`, who computes for all and then calls depart.
bool arrive(const char* what, unsigned mask, void* record, Where where);
void depart(unsigned mask);
// Memory that this lane wrote before `release` is ordered before what a lane reads after its `acquire`.
void release_warp();
void acquire_warp();
// While races are hunted: the exchange of records is the executor's doing and not the kernel's.
void ignore_races(bool ignore);

// All lanes of `mask` leave a Record; `compute(records)` sees them by lane, null where there is none.
template <class Record, class Compute>
void collective(const char* what, unsigned mask, Record& record, Where where, Compute&& compute) {
  if (!arrive(what, mask, &record, where)) return;
  ignore_races(true);
  Record* records[32];
  for (int lane = 0; lane < 32; lane++) {
    Fiber* fiber = block->current->warp->lanes[lane];
    records[lane] = (mask >> lane & 1) && fiber ? static_cast<Record*>(fiber->record) : nullptr;
  }
  compute(records);
  ignore_races(false);
  depart(mask);
}

template <class... Arguments>
struct Bound {
  void (*kernel)(Arguments...);
  void** arguments;

  template <size_t... Index>
  void call(std::index_sequence<Index...>) {
    kernel(*reinterpret_cast<std::remove_reference_t<Arguments>*>(arguments[Index])...);
  }
};

// `arguments` points to one value per parameter, as cuLaunchKernel takes them.
template <class... Arguments>
int launch(void (*kernel)(Arguments...), Launch launch, void** arguments, int argument_count, char* message,
           size_t message_bytes) {
  if (argument_count != sizeof...(Arguments)) {
    snprintf(message, message_bytes, "the kernel takes %zu arguments, not %d", sizeof...(Arguments),
             argument_count);
    return 1;
  }
  Bound<Arguments...> bound{kernel, arguments};
  launch.body = [](void* b) {
    static_cast<Bound<Arguments...>*>(b)->call(std::index_sequence_for<Arguments...>{});
  };
  launch.arguments = &bound;
  return run(launch, message, message_bytes);
}

}  // namespace machine
