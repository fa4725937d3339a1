// Where row i of head h of sequence b lives, dense or packed, and how long the sequence is.
#pragma once

#include "semantics/portable.h"
#include "semantics/positions.h"

namespace regard {

// Strides in elements, by (batch, head, row, column); 0 where a dimension is broadcast.
struct Strides {
  int64 batch = 0;
  int64 head = 0;
  int64 row = 0;
  int64 column = 0;

  bool operator==(const Strides&) const = default;
};

// Lengths and positions of every sequence; null pointers where a dense batch needs none.
struct SequenceTable {
  const int32* begins_q = nullptr;  // cu_seqlens_q
  const int32* begins_k = nullptr;
  const int32* used_q = nullptr;  // seqused_q
  const int32* used_k = nullptr;
  int64 len_q = 0;  // dense lengths
  int64 len_k = 0;
  Positions positions{};           // of the first sequence
  int64 position_stride = 0;       // from a sequence to the next; 0: all have the same positions
  bool has_row_positions = false;  // though positions.rows may not have been read

  bool operator==(const SequenceTable&) const = default;
};

// One batch entry: real lengths, and its first row within packed tensors (0 when dense).
struct Sequence {
  int64 len_q = 0;
  int64 len_k = 0;
  int64 first_q = 0;
  int64 first_k = 0;
  Positions positions{};
};

REGARD_INLINE Positions positions_of(const SequenceTable& table, int64 b) {
  Positions positions = table.positions;
  if (positions.rows) positions.rows += b * table.position_stride;
  return positions;
}
REGARD_INLINE Sequence sequence(const SequenceTable& table, int64 b) {
  Sequence s{table.len_q, table.len_k, 0, 0, positions_of(table, b)};
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
