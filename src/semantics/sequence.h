// Where row i of head h of sequence b lives, dense or packed, and how long the sequence is.
#pragma once

#include "semantics/portable.h"

namespace regard {

// Strides in elements, by (batch, head, row, column); 0 where a dimension is broadcast.
struct Strides {
  int64 batch = 0;
  int64 head = 0;
  int64 row = 0;
  int64 column = 0;

  bool operator==(const Strides&) const = default;
};

// Lengths of every sequence; null pointers where a dense batch needs none.
struct SequenceTable {
  const int32* begins_q = nullptr;  // cu_seqlens_q
  const int32* begins_k = nullptr;
  const int32* used_q = nullptr;  // seqused_q
  const int32* used_k = nullptr;
  int64 len_q = 0;  // dense lengths
  int64 len_k = 0;

  bool operator==(const SequenceTable&) const = default;
};

// One batch entry: real lengths, and its first row within packed tensors (0 when dense).
struct Sequence {
  int64 len_q = 0;
  int64 len_k = 0;
  int64 first_q = 0;
  int64 first_k = 0;
};

REGARD_INLINE Sequence sequence(const SequenceTable& table, int64 b) {
  Sequence s{table.len_q, table.len_k, 0, 0};
  if (table.begins_q) {
    s.first_q = table.begins_q[b];
    s.len_q = table.begins_q[b + 1] - s.first_q;
  }
  if (table.begins_k) {
    s.first_k = table.begins_k[b];
    s.len_k = table.begins_k[b + 1] - s.first_k;
  }
  if (table.used_q) s.len_q = table.used_q[b];
  if (table.used_k) s.len_k = table.used_k[b];
  return s;
}

// The offset of (b, h, row, 0). Packed tensors have batch stride 0 and first = first_q or first_k.
REGARD_INLINE int64 offset_of(const Strides& strides, int64 b, int64 h, int64 first, int64 row) {
  return b * strides.batch + h * strides.head + (first + row) * strides.row;
}

}  // namespace regard
