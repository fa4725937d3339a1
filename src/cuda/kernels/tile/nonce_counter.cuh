// A counter in global memory that blocks share and nobody clears: it counts up from the call's
// nonce, a random 64-bit number.
//
// A launch counts exactly `count` times. Until the last time the word is in [nonce, nonce + count);
// a block that finds anything else before its first count finds what an earlier call left, and
// writes the nonce if no other block has done so since.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"

namespace regard {

struct NonceCounter {
  uint64* word;
  uint64 nonce;

  // Before a block's first count.
  REGARD_DEVICE void begin(uint32 count) const {
    const uint64 was = load_relaxed(word);
    if (was - nonce >= count) atomic_cas(word, was, nonce);
  }
  // How many counts came before this one.
  REGARD_DEVICE uint64 next() const { return atomic_increment(word) - nonce; }
};

}  // namespace regard
