// Problem: what was asked, validated and in one form. It is plain data that every backend reads.
#pragma once

#include "regard/type.hpp"
#include "semantics/dropout.h"
#include "semantics/features.h"
#include "semantics/mask.h"
#include "semantics/score.h"
#include "semantics/sequence.h"
#include "semantics/spans.h"

namespace regard {

// A tensor seen as (batch, head, row, column); which of these exist depends on the tensor. Packed
// tensors have batch stride 0 and their rows begin at the sequence's first row.
struct View {
  void* data = nullptr;
  Type type = Type::none;
  Strides strides;

  REGARD_INLINE bool given() const { return type != Type::none; }
  bool operator==(const View&) const = default;
};

// The spans of rows or keys, `count` for each.
struct SpanView {
  View view;
  int32 count = 0;

  bool operator==(const SpanView&) const = default;
};

struct Sizes {
  int64 batch = 0;
  int64 heads_q = 0;
  int64 heads_kv = 0;
  int64 len_q = 0;  // the longest sequence, if packed
  int64 len_k = 0;
  int64 rows_q = 0;  // rows of q per head over the whole batch: batch * len_q, or total_q
  int64 rows_k = 0;
  int64 dim = 0;
  int64 dim_v = 0;

  REGARD_INLINE int64 group() const { return heads_kv > 0 ? heads_q / heads_kv : 0; }
  bool operator==(const Sizes&) const = default;
};

struct Problem {
  bool backward = false;
  bool packed = false;
  bool varlen = false;  // sequences may be shorter than the sizes say: packed, or seqused given
  bool deterministic = false;   // gradients must not depend on the order of a GPU's blocks
  uint8 precision = 0;          // of f32 products: 0 = full, 1 = tf32, 2 = bf16
  Type type = Type::none;       // of q, k and v
  bool seed_in_memory = false;  // kernels read dropout's seed
  bool continues = false;       // forward: out and lse hold a result over other keys
  Sizes sizes;
  Features features;
  MaskParams mask_params;
  ScoreParams<double> score;
  DropoutParams dropout;
  SequenceTable sequences;

  View q, k, v;
  View bias, mask, alibi_slopes, sink;
  View out, lse;  // outputs forward, inputs backward
  View dout, dlse;
  View dq, dk, dv, dbias, dsink;
  int64 bias_sizes[4] = {1, 1, 1, 1};  // 1 where the bias is broadcast
  bool accumulate = false;
  bool gradients_named = false;  // false while only a workspace or an explanation is asked for
  SpanView row_spans, key_spans;
  View delta;  // backward: instead of out and dlse

  REGARD_INLINE bool wants(const View& gradient) const {
    return gradient.given() || !gradients_named;
  }
  bool operator==(const Problem&) const = default;
};

// f64 computes in f64, everything else in f32.
REGARD_INLINE bool computes_in_f64(const Problem& problem) { return problem.type == Type::f64; }

// A pair may be hidden from a row that another row of the same tile sees.
REGARD_INLINE bool hides_pairs(const Problem& problem) {
  const Features& on = problem.features;
  return on.interval || tests_pairs(on) || on.bias;
}

}  // namespace regard
