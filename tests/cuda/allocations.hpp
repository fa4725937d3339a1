// The allocations of the tests' threads, which the tests count and let fail.
#pragma once

namespace regard::tests {

#ifdef REGARD_SANITIZED  // sanitizers bring the operators: nothing is counted, and none fails
inline constexpr bool kCountsAllocations = false;
#else
inline constexpr bool kCountsAllocations = true;
#endif

inline thread_local int allocations = 0;
inline thread_local int failing_allocation = -1;  // of those to come, from 0 on; -1: none fails

}  // namespace regard::tests
