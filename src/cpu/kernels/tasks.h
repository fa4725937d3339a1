// What the backend hands to a kernel: one task, and where its results go.
#pragma once

#include "plan/cpu/kernel/visits.h"
#include "problem/problem.h"

namespace regard {

// One block of query rows of one kv head, and all keys or one chunk of them.
struct ForwardTask {
  int64 b = 0;
  int64 kv = 0;
  int64 block = 0;                   // of RowBlocks
  Interval keys;                     // all of them, or a chunk
  void* partial = nullptr;           // where a chunk leaves its partial results; null: finish here
  const SpanReach* reach = nullptr;  // of each query head of the group; null: not known
};

// The chunks of one block of query rows, to be merged in their order.
struct CombineTask {
  int64 b = 0;
  int64 kv = 0;
  int64 block = 0;
  int64 chunks = 0;
  void* partial = nullptr;   // the first chunk's
  int64 partial_stride = 0;  // bytes to the next one's
};

// One chunk of keys of one kv head, and all its query rows.
struct BackwardTask {
  int64 b = 0;
  int64 kv = 0;
  int64 chunk = 0;
  const SpanReach* reach = nullptr;  // of each query head of the group; null: not known
};

// Results that tasks share, each in an order that does not depend on threads.
struct BackwardShared {
  void* dq = nullptr;  // [row blocks of this (b, kv)][panels of a block][padded(dim)][panel]
  int32* next_chunk = nullptr;    // [row blocks of this (b, kv)]: the chunk that may add to dq next
  void* deltas = nullptr;         // [row blocks of this (b, kv)][block_q]; null: not shared
  int32* delta_states = nullptr;  // [row blocks of this (b, kv)]: see SharedDeltas
  View dbias;  // terms are added: Reals, or f16 or bf16 where each element has one term
  uint8* nonfinite_k = nullptr;  // [len_k] of this (b, kv): rows for the fix-up pass
};

}  // namespace regard
