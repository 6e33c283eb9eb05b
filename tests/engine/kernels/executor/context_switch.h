// Switching from one stack to another: ucontext would ask the kernel about signal masks at every switch, which is
// eight times slower.
#pragma once
#include <cstring>

// Saves the callee-saved registers on this stack and its pointer in *save, then continues at `to`.
extern "C" void executor_switch(void** save, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.type executor_switch,@function
executor_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size executor_switch,.-executor_switch
)");

// A stack that, when switched to, begins in `entry`. The null above it ends backtraces and aligns the stack.
inline void* fresh_stack(char* top, void (*entry)()) {
  void** pointer = reinterpret_cast<void**>(top);
  *--pointer = nullptr;
  *--pointer = reinterpret_cast<void*>(entry);
  for (int registers = 0; registers < 6; registers++) *--pointer = nullptr;
  return pointer;
}

#elif defined(__aarch64__)
asm(R"(
.text
.type executor_switch,%function
executor_switch:
  sub sp, sp, #160
  stp x19,x20,[sp,#0]
  stp x21,x22,[sp,#16]
  stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]
  stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x2, sp
  str x2,[x0]
  mov sp, x1
  ldp x19,x20,[sp,#0]
  ldp x21,x22,[sp,#16]
  ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]
  ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  add sp, sp, #160
  ret
.size executor_switch,.-executor_switch
)");

inline void* fresh_stack(char* top, void (*entry)()) {
  void** pointer = reinterpret_cast<void**>(top - 160);
  memset(pointer, 0, 160);
  pointer[11] = reinterpret_cast<void*>(entry);  // x30, where `ret` goes
  return pointer;
}

#else
#error "the executor has no context switch for this CPU"
#endif
