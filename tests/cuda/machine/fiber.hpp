// Fiber: a stack of its own that a thread of the operating system can switch to and from.
#pragma once

#include <cstddef>

namespace regard::emulated {

struct Fiber {
  void* stack_pointer = nullptr;  // while it is not running
  void* machine_context = nullptr;
  void* sanitizer_state = nullptr;
  const void* bottom = nullptr;  // of its stack
  std::size_t size = 0;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

// `fiber` will call entry(argument) when it is first switched to; entry never returns.
void make_fiber(Fiber& fiber, void* bottom, std::size_t size, void (*entry)(void*), void* argument);

// Goes on with `to`; returns when somebody switches back to `from`, the caller.
void switch_fiber(Fiber& from, Fiber& to);

// Stacks side by side, an unreadable page before each. Their tops differ in the lowest bits, so
// that the same variable of many threads does not fall into one set of the cache.
class Stacks {
 public:
  Stacks(int count, std::size_t size);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  void* bottom(int index) const;
  std::size_t size(int index) const;

 private:
  unsigned char* memory_ = nullptr;
  std::size_t total_ = 0;
  std::size_t stride_ = 0;
};

}  // namespace regard::emulated
