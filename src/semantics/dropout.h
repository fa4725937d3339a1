// Which elements dropout keeps: a pure function of (seed, offset, b, h, i, j).
//
// Philox4x32 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011)
// makes a call's key from seed and offset in ten rounds, and an element's bits from that key in
// seven, the fewest that pass the BigCrush tests there. One Philox call serves eight columns of one
// row, 16 bits each. A thread of a matrix instruction holds columns 2c and 2c + 1 of every eight,
// and so needs one call for 32 keys.
#pragma once

#include "semantics/portable.h"
#include "semantics/positions.h"

namespace regard {

struct Philox {
  uint32 word[4];
};

// Several calls interleaved, so that the products of one hide the latency of the others.
template <int kRounds, uint32 kCalls>
REGARD_INLINE void philox(Philox (&counters)[kCalls], uint32 key_low, uint32 key_high) {
  REGARD_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    REGARD_UNROLL
    for (uint32 i = 0; i < kCalls; ++i) {
      Philox& counter = counters[i];
      const uint64 a = uint64(counter.word[0]) * 0xD2511F53u;
      const uint64 b = uint64(counter.word[2]) * 0xCD9E8D57u;
      counter = {{uint32(b >> 32) ^ counter.word[1] ^ key_low, uint32(b),
                  uint32(a >> 32) ^ counter.word[3] ^ key_high, uint32(a)}};
    }
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
}
template <int kRounds>
REGARD_INLINE Philox philox(Philox counter, uint32 key_low, uint32 key_high) {
  Philox counters[1] = {counter};
  philox<kRounds>(counters, key_low, key_high);
  return counters[0];
}

struct DropoutParams {
  uint32 threshold = 0;  // dropped if the element's 16 bits are below it
  uint32 key_low = 0;    // the key; or the address of a seed that kernels read
  uint32 key_high = 0;
  uint32 offset = 0;  // of a seed that kernels read

  bool operator==(const DropoutParams&) const = default;
};

// p realised is threshold / 65536.
REGARD_INLINE uint32 dropout_threshold(double p) {
  const double steps = p * 65536 + 0.5;
  return steps >= 65535 ? 65535u : uint32(steps);
}

// Seed and offset mix into one key, so that a step costs nothing.
REGARD_INLINE DropoutParams keyed_dropout(uint32 threshold, uint64 seed, uint64 offset) {
  const Philox key =
      philox<10>({{uint32(offset), uint32(offset >> 32), 0, 0}}, uint32(seed), uint32(seed >> 32));
  return {threshold, key.word[0], key.word[1], 0};
}
REGARD_INLINE DropoutParams dropout_params(double p, uint64 seed, uint64 offset) {
  return keyed_dropout(dropout_threshold(p), seed, offset);
}

// A seed in memory is two words, the low one first.
REGARD_INLINE uint64 seed_in(const uint32* words) { return uint64(words[1]) << 32 | words[0]; }

// A kernel reads the seed when it runs, and makes the key then.
REGARD_INLINE DropoutParams dropout_params_at(double p, uint64 seed_address, uint32 offset) {
  return {dropout_threshold(p), uint32(seed_address), uint32(seed_address >> 32), offset};
}
REGARD_INLINE uint64 seed_address(const DropoutParams& params) {
  return uint64(params.key_high) << 32 | params.key_low;
}

REGARD_INLINE double realised_probability(const DropoutParams& params) {
  return double(params.threshold) / 65536;
}

// The call that serves column j, and which of its eight 16-bit numbers is j's.
REGARD_INLINE uint32 dropout_call(int64 j) { return uint32(j / 32 * 4 + j % 8 / 2); }
REGARD_INLINE int dropout_slot(int64 j) { return int(j % 32 / 8 * 2 + j % 2); }

REGARD_INLINE Philox dropout_counter(int64 b, int64 h, int64 i, uint32 call) {
  return {{call, uint32(i), uint32(h), uint32(b)}};
}
template <uint32 kCalls>
REGARD_INLINE void draw_dropout(const DropoutParams& params, Philox (&counters)[kCalls]) {
  philox<7>(counters, params.key_low, params.key_high);
}
REGARD_INLINE Philox dropout_bits(const DropoutParams& params, int64 b, int64 h, int64 i,
                                  uint32 call) {
  Philox counters[1] = {dropout_counter(b, h, i, call)};
  draw_dropout(params, counters);
  return counters[0];
}

REGARD_INLINE bool kept(const DropoutParams& params, const Philox& bits, int slot) {
  return ((bits.word[slot / 2] >> (slot % 2 * 16)) & 0xffffu) >= params.threshold;
}

REGARD_INLINE bool keep(const DropoutParams& params, int64 b, int64 h, int64 i, int64 j) {
  return kept(params, dropout_bits(params, b, h, i, dropout_call(j)), dropout_slot(j));
}
// The same of indices that count within a part.
REGARD_INLINE bool keep(const DropoutParams& params, const Positions& at, int64 b, int64 h, int64 i,
                        int64 j) {
  return keep(params, b + at.first_batch, h + at.first_head, at.of_row(i), j + at.first_key);
}

// 1 / (1 - p), with the realised p.
REGARD_INLINE double keep_scale(const DropoutParams& params) {
  return 65536.0 / double(65536u - params.threshold);
}

}  // namespace regard
