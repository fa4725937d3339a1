// Switching stacks: eight instructions on x86-64, the C library's contexts elsewhere.
#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define REGARD_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define REGARD_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(REGARD_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace regard::emulated {
namespace {

constexpr std::size_t kPage = 4096;
thread_local Fiber* leaving = nullptr;
thread_local Fiber* arriving = nullptr;

void before_switch([[maybe_unused]] Fiber& from, [[maybe_unused]] Fiber& to) {
#if defined(REGARD_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&from.sanitizer_state, to.bottom, to.size);
#endif
}

void after_switch([[maybe_unused]] void* state) {
#if defined(REGARD_ADDRESS_SANITIZER)
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(state, &bottom, &size);
  if (leaving->bottom == nullptr) {  // the thread's own stack, seen for the first time
    leaving->bottom = bottom;
    leaving->size = size;
  }
#endif
}

[[noreturn]] void begin() {
  after_switch(nullptr);
  arriving->entry(arriving->argument);
  __builtin_unreachable();
}

}  // namespace

#if defined(__x86_64__)

extern "C" void regard_switch_stacks(void** from, void* to);
asm(R"(
.text
.globl regard_switch_stacks
.hidden regard_switch_stacks
.type regard_switch_stacks, @function
regard_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size regard_switch_stacks, .-regard_switch_stacks
)");

void make_fiber(Fiber& fiber, void* bottom, std::size_t size, void (*entry)(void*),
                void* argument) {
  fiber = {.bottom = bottom, .size = size, .entry = entry, .argument = argument};
  const auto top = (reinterpret_cast<std::uintptr_t>(bottom) + size) & ~std::uintptr_t(15);
  auto** words = reinterpret_cast<void**>(top);
  *--words = nullptr;  // where begin() would return to
  *--words = reinterpret_cast<void*>(&begin);
  for (int saved = 0; saved < 6; ++saved) *--words = nullptr;
  fiber.stack_pointer = words;
}

void switch_fiber(Fiber& from, Fiber& to) {
  leaving = &from;
  arriving = &to;
  before_switch(from, to);
  regard_switch_stacks(&from.stack_pointer, to.stack_pointer);
  after_switch(from.sanitizer_state);
}

#else

void make_fiber(Fiber& fiber, void* bottom, std::size_t size, void (*entry)(void*),
                void* argument) {
  fiber = {.bottom = bottom, .size = size, .entry = entry, .argument = argument};
  auto* const context = new ucontext_t;  // kept as long as the process
  getcontext(context);
  context->uc_stack.ss_sp = bottom;
  context->uc_stack.ss_size = size;
  context->uc_link = nullptr;
  makecontext(context, begin, 0);
  fiber.machine_context = context;
}

void switch_fiber(Fiber& from, Fiber& to) {
  leaving = &from;
  arriving = &to;
  if (!from.machine_context) from.machine_context = new ucontext_t;
  before_switch(from, to);
  swapcontext(static_cast<ucontext_t*>(from.machine_context),
              static_cast<ucontext_t*>(to.machine_context));
  after_switch(from.sanitizer_state);
}

#endif

Stacks::Stacks(int count, std::size_t size)
    : stride_((size + kPage - 1) / kPage * kPage + 2 * kPage) {
  total_ = stride_ * std::size_t(count);
  void* const memory = mmap(nullptr, total_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<unsigned char*>(memory);
  for (int i = 0; i < count; ++i) mprotect(memory_ + stride_ * std::size_t(i), kPage, PROT_NONE);
}

Stacks::~Stacks() {
#if defined(REGARD_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(memory_, total_);  // fibers may have been left in mid-call
#endif
  munmap(memory_, total_);
}

void* Stacks::bottom(int index) const { return memory_ + stride_ * std::size_t(index) + kPage; }

std::size_t Stacks::size(int index) const {
  return stride_ - kPage - std::size_t(index % 32) * (kPage / 32);
}

}  // namespace regard::emulated
