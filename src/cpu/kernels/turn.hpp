// Taking turns: tasks that add to one sum do so in a fixed order.
#pragma once

#include <sched.h>

#include "cpu/kernels/processor.h"
#include "semantics/portable.h"

namespace regard {
namespace {

// Waits until the counter stands at `turn`. The tasks before this one have all begun, so it will.
inline void wait_for_turn(const int32* counter, int32 turn) {
  for (int spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != turn; ++spins) {
    if (spins > 1000) {
      sched_yield();
    } else {
      pause_processor();
    }
  }
}

inline void pass_turn(int32* counter, int32 turn) {
  __atomic_store_n(counter, turn, __ATOMIC_RELEASE);
}

}  // namespace
}  // namespace regard
