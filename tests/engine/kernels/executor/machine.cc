// The scheduler. Always compiled without sanitizers; -DEXECUTOR_TSAN tells TSan about fibers and barriers.
#include "machine.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>

#include "context_switch.h"

#ifdef EXECUTOR_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define TSAN(statement) statement
#else
#define TSAN(statement)
#endif

namespace machine {

namespace {

// Not a power of two, for which the ends of all stacks would share a few places of the processor's caches.
constexpr size_t STACK_BYTES = 64 * 1024 + 5 * 64;
constexpr unsigned TAIL_BYTES = 4096;  // behind a block's shared memory, looked at for what should not be there
constexpr unsigned char POISON = 0xFF;
constexpr unsigned long long STEP_LIMIT = 2'000'000'000;

enum class Order { in_turn, random, one_warp_ahead };

struct Machine : Block {
  const Launch* launch = nullptr;
  std::string error;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned ready_warps = 0, live = 0;
  // The one barrier that kernels have, __syncthreads.
  unsigned waiting = 0;
  Where barrier_where;
  // Who runs next.
  Order order = Order::in_turn;
  unsigned long long random_state = 0, steps = 0;
  unsigned priority[32] = {};
  // Stacks, and where to return to when the block has ended.
  char* stacks = nullptr;
  size_t stack_count = 0;
  void* main_stack = nullptr;
  void* main_tsan = nullptr;
  char begin_order[64], end_order[64], barrier_order[64];
};

Machine* self() { return static_cast<Machine*>(block); }

void switch_to(void** save, void* stack, [[maybe_unused]] void* tsan) {
  TSAN(__tsan_switch_to_fiber(tsan, 1));  // 1: switching orders nothing
  executor_switch(save, stack);
}

bool same(const Where& a, const Where& b) { return a.line() == b.line() && a.column() == b.column(); }

unsigned random_below(unsigned limit) {
  unsigned long long& x = self()->random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return (x >> 32) % limit;
}

unsigned lowest(unsigned mask) { return __builtin_ctz(mask); }

unsigned random_member(unsigned mask) {
  for (unsigned skip = random_below(__builtin_popcount(mask)); skip; skip--) mask &= mask - 1;
  return lowest(mask);
}

unsigned members_above(unsigned mask, unsigned bit) { return bit < 31 ? mask & (~0u << (bit + 1)) : 0; }

[[noreturn]] void fail_deadlock() {
  std::string message = "deadlock, waiting:";
  const Fiber* last = nullptr;
  int listed = 0;
  for (const Fiber& fiber : self()->fibers) {
    const bool alike = last && last->what == fiber.what && same(last->where, fiber.where);
    if (fiber.state == State::finished || alike || listed++ >= 6) continue;
    message += std::string(" [") + fiber.what + " " + at(fiber, fiber.where) + "]";
    last = &fiber;
  }
  fail(message);
}

unsigned pick_warp() {
  Machine& m = *self();
  if (m.order == Order::random) return random_member(m.ready_warps);
  if (m.order == Order::one_warp_ahead) {
    unsigned best = lowest(m.ready_warps);
    for (unsigned rest = m.ready_warps; rest; rest &= rest - 1)
      if (m.priority[lowest(rest)] > m.priority[best]) best = lowest(rest);
    return best;
  }
  // In turn: the rest of this warp, then the next warp.
  const unsigned warp = m.current ? m.current->index / 32 : 31;
  if (m.current && (m.ready_warps >> warp & 1) && members_above(m.warps[warp].ready, m.current->lane)) return warp;
  const unsigned above = members_above(m.ready_warps, warp);
  return lowest(above ? above : m.ready_warps);
}

Fiber* pick() {
  Machine& m = *self();
  if (!m.ready_warps) fail_deadlock();
  if (++m.steps > STEP_LIMIT) fail("step limit reached: an endless loop?");
  const unsigned w = pick_warp();
  Warp& warp = m.warps[w];
  unsigned lane = lowest(warp.ready);
  if (m.order != Order::in_turn) {
    lane = random_member(warp.ready);
  } else if (m.current && m.current->warp == &warp) {
    const unsigned above = members_above(warp.ready, m.current->lane);
    if (above) lane = lowest(above);
  }
  warp.ready &= ~(1u << lane);
  if (!warp.ready) m.ready_warps &= ~(1u << w);
  return warp.lanes[lane];
}

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  fiber->warp->ready |= 1u << fiber->lane;
  self()->ready_warps |= 1u << (fiber->index / 32);
}

// Let another fiber run; returns when `me` is picked again.
void yield(Fiber* me) {
  Fiber* next = pick();
  block->current = next;
  if (next != me) switch_to(&me->stack_pointer, next->stack_pointer, next->tsan);
}

void shuffle_priorities() {
  for (unsigned& priority : self()->priority) priority = random_below(1u << 30);
}

void open_barrier_if_full() {
  Machine& m = *self();
  if (m.waiting == 0 || m.waiting < m.live) return;
  m.waiting = 0;
  if (m.order == Order::one_warp_ahead) shuffle_priorities();
  for (Fiber& fiber : m.fibers)
    if (fiber.state == State::at_barrier) make_ready(&fiber);
}

void fiber_main() {
  Machine& m = *self();
  TSAN(__tsan_acquire(m.begin_order));
  m.launch->body(m.launch->arguments);
  TSAN(__tsan_release(m.end_order));
  Fiber* me = m.current;
  me->state = State::finished;
  me->warp->live &= ~(1u << me->lane);
  if (--m.live == 0) switch_to(&me->stack_pointer, m.main_stack, m.main_tsan);
  open_barrier_if_full();
  yield(me);
  abort();
}

void on_fault(int signal_number, siginfo_t* info, void*) {
  if (!block || !block->current) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  const char* what = "illegal address";
  if (signal_number == SIGFPE) what = "arithmetic fault";
  if (signal_number == SIGILL || signal_number == SIGTRAP) what = "misaligned access or integer overflow";
  char text[96];
  snprintf(text, sizeof text, "%s %p, ", what, info->si_addr);
  const Fiber& fiber = *block->current;
  fail(text + at(fiber, fiber.where) + " (the last place it waited at)");
}

// Hardware faults of a kernel become errors, as long as this lives.
class FaultHandlers {
 public:
  FaultHandlers() {
    stack_t stack{};
    stack.ss_sp = alternate_;
    stack.ss_size = sizeof alternate_;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < std::size(SIGNALS); i++) sigaction(SIGNALS[i], &action, &old_[i]);
  }
  ~FaultHandlers() {
    for (size_t i = 0; i < std::size(SIGNALS); i++) sigaction(SIGNALS[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  struct sigaction old_[std::size(SIGNALS)];
  stack_t old_stack_{};
  char alternate_[64 * 1024];
};

#ifdef EXECUTOR_TSAN
// TSan's thread of a block's index-th fiber: the same for all blocks and launches, since each takes long to
// make and to forget. Blocks are ordered by begin_order and end_order in any case.
void* tsan_fiber(unsigned index) {
  static std::vector<void*> made;
  while (made.size() <= index) made.push_back(__tsan_create_fiber(0));
  return made[index];
}
#endif

void reset(Fiber& fiber, unsigned index, const unsigned (&threads)[3]) {
  Machine& m = *self();
  fiber.index = index;
  fiber.lane = index % 32;
  fiber.thread = {index % threads[0], index / threads[0] % threads[1], index / (threads[0] * threads[1])};
  fiber.warp = &m.warps[index / 32];
  fiber.warp->lanes[fiber.lane] = &fiber;
  fiber.warp->live = fiber.warp->lanes_there |= 1u << fiber.lane;
  fiber.what = "start";
  fiber.where = Where();
  fiber.open_copies.clear();
  fiber.groups.clear();
  fiber.stack_pointer = fresh_stack(m.stacks + (index + 1) * STACK_BYTES, fiber_main);
  TSAN(fiber.tsan = tsan_fiber(index));
  make_ready(&fiber);
}

void check_tail() {
  Machine& m = *self();
  const unsigned begin = m.launch->shared_bytes, end = std::min(begin + TAIL_BYTES, MAX_SHARED_BYTES);
  for (unsigned i = begin; i < end && m.error.empty(); i++)
    if (m.shared[i] != POISON)
      m.error =
          "shared memory written past its " + std::to_string(begin) + " bytes, at offset " + std::to_string(i);
}

void run_block() {
  Machine& m = *self();
  const unsigned(&threads)[3] = m.launch->threads;
  const unsigned count = threads[0] * threads[1] * threads[2];
  m.fibers.resize(count);
  m.warps.assign((count + 31) / 32, Warp{});
  m.ready_warps = m.waiting = 0;
  m.live = count;
  m.current = nullptr;
  memset(m.shared, POISON, std::min(MAX_SHARED_BYTES, m.launch->shared_bytes + TAIL_BYTES));
  for (unsigned i = 0; i < count; i++) reset(m.fibers[i], i, threads);
  if (m.order == Order::one_warp_ahead) shuffle_priorities();
  TSAN(__tsan_release(m.begin_order));
  Fiber* first = pick();
  m.current = first;
  switch_to(&m.main_stack, first->stack_pointer, first->tsan);
  m.current = nullptr;
  TSAN(__tsan_acquire(m.end_order));
  check_tail();
}

}  // namespace

Block* block = nullptr;

void fail(const std::string& message) {
  Machine& m = *self();
  m.error = message;
  void* abandoned;
  switch_to(&abandoned, m.main_stack, m.main_tsan);
  abort();
}

std::string at(const Fiber& fiber, const Where& where) {
  char text[512];
  const uint3 &b = block->block, &t = fiber.thread;
  const char* file = strrchr(where.file_name(), '/');
  snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u) at %s:%u", b.x, b.y, b.z, t.x, t.y, t.z,
           file ? file + 1 : where.file_name(), where.line());
  return text;
}

void barrier(Where where) {
  Machine& m = *self();
  Fiber* me = m.current;
  if (m.waiting && !same(m.barrier_where, where))
    fail("divergent __syncthreads: " + at(*me, where) + ", others wait at line " +
         std::to_string(m.barrier_where.line()));
  m.barrier_where = where;
  m.waiting++;
  me->state = State::at_barrier;
  me->what = "__syncthreads";
  me->where = where;
  TSAN(__tsan_release(m.barrier_order));
  open_barrier_if_full();
  yield(me);
  TSAN(__tsan_acquire(m.barrier_order));
}

bool arrive(const char* what, unsigned mask, void* record, Where where) {
  Fiber* me = block->current;
  Warp& warp = *me->warp;
  const unsigned members = mask & warp.lanes_there;
  if (!(members >> me->lane & 1))
    fail(std::string(what) + ": the calling lane is not in the mask, " + at(*me, where));
  if (members & ~warp.live)
    fail(std::string(what) + ": the mask names a lane that has exited, " + at(*me, where));
  me->record = record;
  me->mask = mask;
  me->what = what;
  me->where = where;
  warp.arrived |= 1u << me->lane;
  if ((warp.arrived & members) != members) {
    me->state = State::at_collective;
    yield(me);
    return false;
  }
  for (unsigned lane = 0; lane < 32; lane++) {
    if (!(members >> lane & 1)) continue;
    const Fiber& other = *warp.lanes[lane];
    if (other.mask != mask || other.what != what || !same(other.where, where))
      fail(std::string("lanes in different collectives: ") + what + " " + at(*me, where) + " against " +
           other.what + " " + at(other, other.where));
  }
  return true;
}

void depart(unsigned mask) {
  Fiber* me = block->current;
  Warp& warp = *me->warp;
  warp.arrived &= ~mask;
  for (unsigned lane = 0; lane < 32; lane++) {
    Fiber* other = mask >> lane & 1 ? warp.lanes[lane] : nullptr;
    if (other && other != me) make_ready(other);
  }
  if (self()->order == Order::in_turn) return;
  make_ready(me);  // the last to arrive need not be the first to go on
  yield(me);
}

void release_warp() { TSAN(__tsan_release(block->current->warp->order)); }

void acquire_warp() { TSAN(__tsan_acquire(block->current->warp->order)); }

void ignore_races([[maybe_unused]] bool ignore) {
#ifdef EXECUTOR_TSAN
  if (ignore) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#endif
}

int run(const Launch& launch, char* message, size_t message_bytes) {
  const unsigned(&grid)[3] = launch.grid;
  const size_t blocks = static_cast<size_t>(grid[0]) * grid[1] * grid[2];
  const size_t threads = static_cast<size_t>(launch.threads[0]) * launch.threads[1] * launch.threads[2];
  if (!blocks || grid[1] > 65535 || grid[2] > 65535 || !threads || threads > 1024 ||
      launch.shared_bytes > MAX_SHARED_BYTES) {
    snprintf(message, message_bytes, "invalid launch: grid (%u,%u,%u), %zu threads, %u bytes of shared memory",
             grid[0], grid[1], grid[2], threads, launch.shared_bytes);
    return 1;
  }
  Machine m;
  block = &m;
  m.launch = &launch;
  m.shared = launch.shared;
  m.block_dim = dim3(launch.threads[0], launch.threads[1], launch.threads[2]);
  m.grid_dim = dim3(grid[0], grid[1], grid[2]);
  m.copies_land_at_once = launch.seed & 1;
  m.order = launch.seed == 0 ? Order::in_turn : launch.seed & 2 ? Order::one_warp_ahead : Order::random;
  m.stack_count = threads;
  m.stacks = static_cast<char*>(mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  TSAN(m.main_tsan = __tsan_get_current_fiber());
  {
    const FaultHandlers handlers;
    for (size_t i = 0; i < blocks && m.error.empty(); i++) {
      const size_t b = launch.seed & 1 ? blocks - 1 - i : i;
      m.random_state = (launch.seed + 1) * 0x9E3779B97F4A7C15ull ^ (b + 1) * 0xD1B54A32D192ED03ull;
      m.block = {static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                 static_cast<unsigned>(b / (static_cast<size_t>(grid[0]) * grid[1]))};
      run_block();
    }
  }
  munmap(m.stacks, threads * STACK_BYTES);
  block = nullptr;
  snprintf(message, message_bytes, "%s", m.error.c_str());
  return !m.error.empty();
}

}  // namespace machine
