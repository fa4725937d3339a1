// The order in which the chunks of keys add to a block's dq.
#pragma once

#include <sched.h>

#include "cpu/kernels/processor.h"
#include "semantics/portable.h"

namespace regard {
namespace {

// Waits until the chunks before this one have added. Their tasks have all begun, so the wait ends.
inline void wait_for_chunk(const int32* next_chunk, int32 chunk) {
  for (int spins = 0; __atomic_load_n(next_chunk, __ATOMIC_ACQUIRE) != chunk; ++spins) {
    if (spins > 1000) {
      sched_yield();
    } else {
      pause_processor();
    }
  }
}

inline void release_chunk(int32* next_chunk, int32 chunk) {
  __atomic_store_n(next_chunk, chunk, __ATOMIC_RELEASE);
}

}  // namespace
}  // namespace regard
