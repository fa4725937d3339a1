// Which weights dropout drops, as a warpgroup of its own draws it for those that have them: the
// numbers take wide integer products, of which products of tiles leave few a chance.
//
// A word holds a bit for each weight of sixteen pairs, in the lower half of the pair's first, in
// the upper half of its second; the last pair's is bit 0. There is one place for them in shared
// memory, and what is drawn next waits in registers until it has been read.
#pragma once

#include "cuda/kernels/tile/wgmma/pipeline.cuh"
#include "semantics/dropout.h"

namespace regard {

// Adds the bits of the next pair, for which `numbers` has 16 bits each.
REGARD_DEVICE void add_drops(uint32& drops, uint32 numbers, uint32 thresholds) {
  drops += drops + less_u16x2(numbers, thresholds);
}
REGARD_DEVICE uint32 thresholds_of(const DropoutParams& dropout) {
  return dropout.threshold | dropout.threshold << 16;
}

// take(pair, halves) for each pair of a word: the halves are all ones where a weight is dropped.
template <int kPairs, int kPair = 0, class Take>
REGARD_DEVICE void each_dropped(uint32 drops, Take take) {
  if constexpr (kPair < kPairs) {
    take(kPair, spread_bit_u16x2<kPairs - 1 - kPair>(drops));
    each_dropped<kPairs, kPair + 1>(drops, take);
  }
}

// The side that draws. Each of its threads calls these.
template <class Memory>
struct DropWriter {
  const Memory& memory;
  bool started = false;

  REGARD_DEVICE void await_readers() const {
    bar_sync(Memory::kDropsRead, Memory::kDropReaders + 128);
  }
  // Around the stores of a block's.
  REGARD_DEVICE void begin() {
    if (started) await_readers();
    started = true;
  }
  REGARD_DEVICE void end() const { mbarrier_arrive(memory.barrier(Memory::kDropsFull, 0)); }
  // Nobody is left waiting at the barrier.
  REGARD_DEVICE void finish() const {
    if (started) await_readers();
  }
};

// The side that has the weights: kWords words of a block.
template <class Memory, int kWords>
struct DropReader {
  int parity = 0;

  REGARD_DEVICE void read(uint32 (&drops)[kWords], const Memory& memory) {
    mbarrier_wait(memory.barrier(Memory::kDropsFull, 0), parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      drops[i] = load_shared_32(memory.drops(i, thread_index() - 128));
    }
    bar_arrive(Memory::kDropsRead, Memory::kDropReaders + 128);
  }
};

}  // namespace regard
