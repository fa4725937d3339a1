// Dropout bits on their way from the warpgroup that generates them to the warpgroups that apply
// them. A separate warpgroup generates them because the wide integer multiplications of Philox are
// several times slower next to wgmma.
//
// A word has one bit for each weight of 16 pairs of neighbouring keys: the first key of a pair in
// the lower half, the second in the upper half, the last pair in bit 0. A bit that is set drops the
// weight. Shared memory holds one block's words; the next block's wait in registers.
#pragma once

#include "cuda/kernels/tile/dropout_of.cuh"
#include "cuda/kernels/tile/wgmma/pipeline.cuh"
#include "semantics/dropout.h"

namespace regard {

// Appends the bits of the next pair, which `random` has 16 bits each for.
REGARD_DEVICE void append_dropout_bits(uint32& bits, uint32 random, uint32 thresholds) {
  bits += bits + less_u16x2(random, thresholds);
}
REGARD_DEVICE uint32 dropout_thresholds(const DropoutParams& dropout) {
  return dropout.threshold | dropout.threshold << 16;
}

// apply(pair, halves) for each pair of a word; a half is all ones where the weight is dropped.
template <int kPairs, int kPair = 0, class Apply>
REGARD_DEVICE void each_dropout_pair(uint32 bits, Apply apply) {
  if constexpr (kPair < kPairs) {
    apply(kPair, spread_bit_u16x2<kPairs - 1 - kPair>(bits));
    each_dropout_pair<kPairs, kPair + 1>(bits, apply);
  }
}

// Every thread of the generating warpgroup: begin, stores of one block's words, end.
template <class Memory>
struct DropoutBitsWriter {
  const Memory& memory;
  bool has_written = false;

  REGARD_DEVICE void begin() {
    if (has_written) await_readers();
    has_written = true;
  }
  REGARD_DEVICE void end() const { mbarrier_arrive(memory.dropout_bits_full()); }
  // No reader is left waiting at the named barrier.
  REGARD_DEVICE void finish() const {
    if (has_written) await_readers();
  }
  REGARD_DEVICE void await_readers() const {
    bar_sync(Memory::kDropoutBitsRead, Memory::kDropoutBitsReaders + 128);
  }
};

// Every thread that applies the bits: kWords words of each block.
template <class Memory, int kWords>
struct DropoutBitsReader {
  int parity = 0;

  REGARD_DEVICE void read(uint32 (&bits)[kWords], const Memory& memory) {
    mbarrier_wait(memory.dropout_bits_full(), parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bits[i] = load_shared_32(memory.dropout_bits(i, thread_index() - 128));
    }
    bar_arrive(Memory::kDropoutBitsRead, Memory::kDropoutBitsReaders + 128);
  }
};

}  // namespace regard
