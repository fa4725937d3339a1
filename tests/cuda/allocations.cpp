// Operators new and delete that count, and that fail where a test says so.
#include "tests/cuda/allocations.hpp"

#include <cstdlib>
#include <new>

#ifndef REGARD_SANITIZED

using namespace regard::tests;

namespace {

// Not inlined, because the compiler would take malloc and delete for a pair that does not match.
[[gnu::noinline]] void* counted(std::size_t bytes) {
  ++allocations;
  if (failing_allocation >= 0 && failing_allocation-- == 0) return nullptr;
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) {
  if (void* const memory = counted(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }

#endif
