// The inputs that are copied to the workspace because TMA cannot load them where they are. Rows of
// a copy begin at multiples of 16 bytes, and its elements have the type of q.
#pragma once

#include "problem/problem.h"

namespace regard {

enum class Input : uint8 { q, k, v, dout };
inline constexpr int kInputs = 4;

struct InputSet {
  uint8 bits = 0;

  REGARD_INLINE bool empty() const { return bits == 0; }
  REGARD_INLINE bool has(Input input) const { return (bits >> int(input) & 1) != 0; }
  REGARD_INLINE void add(Input input) { bits = uint8(bits | 1 << int(input)); }
};

REGARD_INLINE bool is_of_queries(Input input) { return input == Input::q || input == Input::dout; }

template <class AnyProblem>  // const Problem or Problem
REGARD_INLINE auto& view_of(AnyProblem& p, Input input) {
  return input == Input::q ? p.q : input == Input::k ? p.k : input == Input::v ? p.v : p.dout;
}

// A copy: [batch][heads][rows][columns rounded up to whole vectors]; packed: 1 batch.
struct InputShape {
  static constexpr int kVector = 8;  // elements of 16 bytes

  int64 batch, heads, rows, columns;

  REGARD_INLINE int64 row() const { return round_up(columns, kVector); }
  REGARD_INLINE Strides strides() const {
    return {.batch = batch > 1 ? heads * rows * row() : 0,
            .head = rows * row(),
            .row = row(),
            .column = 1};
  }
};

REGARD_INLINE InputShape shape_of(const Problem& p, Input input) {
  const Sizes& s = p.sizes;
  const bool queries = is_of_queries(input);
  return {.batch = p.packed ? 1 : s.batch,
          .heads = queries ? s.heads_q : s.heads_kv,
          .rows = p.packed ? (queries ? s.rows_q : s.rows_k) : (queries ? s.len_q : s.len_k),
          .columns = input == Input::q || input == Input::k ? s.dim : s.dim_v};
}

}  // namespace regard
