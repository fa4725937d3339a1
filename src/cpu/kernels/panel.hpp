// A panel: query rows of one kv head, side by side in the lanes of a few vectors.
#pragma once

#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/tasks.h"
#include "plan/cpu/kernel/visits.h"
#include "semantics/portable.h"

namespace regard {
namespace {

inline constexpr int kMaxPanel = 32;

// A panel's keys of one block, beginning with a whole Unit of the block.
struct TileKeys {
  Interval keys;  // empty: the panel sees none
  // What may hide some of the pairs with these keys.
  bool mask = false;
  bool row_spans = false;
  bool key_spans = false;
};

// What the mask shows of a panel's pairs in up to 32 blocks of keys: a bit for each block.
struct MaskBits {
  Interval blocks;
  uint32 some = 0;
  uint32 all = 0;
};

struct Panel {
  int rows = 0;              // lanes in use
  int64 first = 0;           // row of the kv head's row space that lane 0 holds
  int64 head[kMaxPanel];     // query head of each lane
  int64 query[kMaxPanel];    // row number within the sequence
  Interval keys[kMaxPanel];  // what each lane sees, as far as intervals say
  IntervalSet seen;          // keys that some lane sees, as far as intervals and row spans say
  Interval common;           // keys that every lane sees, as far as intervals say
  TileKeys tile;             // of the block at hand
  MaskBits mask;
  bool has_out = false;  // forward: whether its sums are begun
};

// A kv head of one sequence: what all tasks of it have in common.
struct HeadContext {
  const Problem& problem;
  int64 b;
  int64 kv;
  Sequence seq;

  REGARD_INLINE int64 offset_q(const View& view, const Panel& panel, int lane) const {
    return offset_of(view.strides, b, panel.head[lane], seq.first_q, panel.query[lane]);
  }
  // The same of `count` lanes, from one on.
  REGARD_INLINE void offsets_q(const View& view, const Panel& panel, int first, int count,
                               int64* to) const {
    if (count < 1) return;
    const int last = first + count - 1;
    const bool in_order = last < panel.rows && panel.head[first] == panel.head[last];
    int64 offset = offset_q(view, panel, first);
    for (int n = 0; n < count; ++n, offset += view.strides.row) {
      to[n] = in_order ? offset : offset_q(view, panel, first + n);
    }
  }
  REGARD_INLINE int64 offset_k(const View& view, int64 row) const {
    return offset_of(view.strides, b, kv, seq.first_k, row);
  }
  // Of the head of a panel's rows, which is the only one where something is known.
  REGARD_INLINE SpanReach reach_of(const SpanReach* of_group, const Panel& panel) const {
    return of_group ? of_group[panel.head[0] - kv * problem.sizes.group()] : SpanReach{};
  }
};

// The keys between the first and the last one that a row's spans show, of those that it may see.
// Adds what they show to `seen`.
inline Interval keys_in_spans_of_row(const HeadContext& context, int64 head, int64 query,
                                     Interval keys, IntervalSet& seen) {
  IntervalSet own;
  add_spans(own, spans_of(context.problem.row_spans, context.b, head, context.seq.first_q, query),
            keys);
  seen.add(own);
  return own.all();
}

// Calls each(head, first lane, lane behind the last) for the lanes of each query head of a panel.
template <class Each>
void each_head(const Panel& panel, Each each) {
  for (int first = 0, end; first < panel.rows; first = end) {
    for (end = first + 1; end < panel.rows && panel.head[end] == panel.head[first];) ++end;
    each(panel.head[first], first, end);
  }
}

// The queries of a panel's lanes from `first` to `end`, which are rows of one head.
REGARD_INLINE Interval queries_of(const Panel& panel, int first, int end) {
  return {panel.query[first], panel.query[end - 1] + 1};
}

// Vectors that hold the panel's rows; few rows leave others empty.
template <class L, class SomePanel>
int vectors_of(const SomePanel& panel) {
  return int(divide_up(panel.rows, L::kLanes));
}

// How many keys of the panel's tile, from the first on, hold all that the rows of its first vector
// see, as far as intervals say; all of the tile unless panels have two vectors, both are in use,
// and products are not those of tile registers.
template <class L>
int64 keys_of_first_vector(const Panel& panel) {
  const Interval& keys = panel.tile.keys;
  const int64 all = keys.end - keys.begin;
  if (kHasTiles<L> || L::kVectors != 2 || panel.rows <= L::kLanes) return all;
  if (panel.common.end >= keys.end) return all;
  int64 end = keys.begin;
  for (int lane = 0; lane < L::kLanes; ++lane) end = larger(end, panel.keys[lane].end);
  return smaller(all, end - keys.begin);
}

// Heads and queries of a panel's rows.
inline void set_rows(Panel& panel, int64 head, int64 query, int64 len_q) {
  for (int lane = 0; lane < panel.rows; ++head, query = 0) {
    const int end = int(smaller<int64>(panel.rows, lane + len_q - query));
    for (; lane < end; ++lane, ++query) {
      panel.head[lane] = head;
      panel.query[lane] = query;
    }
  }
}

// What each row of a panel sees, and all of them.
inline void set_visible_keys(Panel& panel, const HeadContext& context) {
  const Problem& p = context.problem;
  const Sequence& s = context.seq;
  Interval all{0, s.len_k};
  panel.seen.clear();
  panel.common = all;
  if (p.mask_params.left < 0 && p.mask_params.right < 0 && !p.features.row_spans) {
    for (int lane = 0; lane < panel.rows; ++lane) panel.keys[lane] = all;
    panel.seen.add(all);
    return;
  }
  all = {};
  for (int lane = 0; lane < panel.rows; ++lane) {
    const int64 query = panel.query[lane];
    Interval& keys = panel.keys[lane] = visible_keys(p.mask_params, s, query);
    if (p.features.row_spans) {
      keys = keys_in_spans_of_row(context, panel.head[lane], query, keys, panel.seen);
    }
    all = hull(all, keys);
    panel.common = intersection(panel.common, keys);
  }
  if (!p.features.row_spans) panel.seen.add(all);
}

// Fills `panels` from `rows` rows of the kv head's row space; returns how many it filled.
template <class L, class SomePanel>
int make_panels(SomePanel* panels, const HeadContext& context, int64 first, int64 rows) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 len_q = context.seq.len_q;
  int count = 0;
  for (int64 at = 0; at < rows; at += kWidth, ++count) {
    Panel& panel = panels[count];
    panel.first = first + at;
    panel.rows = int(smaller<int64>(kWidth, rows - at));
    panel.mask = {};
    panel.has_out = false;
    const int64 head = context.kv * context.problem.sizes.group() + panel.first / len_q;
    set_rows(panel, head, panel.first % len_q, len_q);
    set_visible_keys(panel, context);
    for (int lane = panel.rows; lane < kWidth; ++lane) {
      panel.head[lane] = panel.head[0];  // of a row that exists
      panel.query[lane] = panel.query[0];
      panel.keys[lane] = {};  // sees nothing, and does not count in seen and common
    }
  }
  return count;
}

// From the first to the last key that panels see.
template <class SomePanel>
REGARD_INLINE Interval seen_by(const SomePanel* panels, int count) {
  Interval seen;
  for (int i = 0; i < count; ++i) seen = hull(seen, panels[i].seen.all());
  return seen;
}

// Prefetches elements of each lane's row from its offset(lane) on; kLocality as the builtin has it:
// 3 into the first cache, 2 into the second. Lanes that share a row follow one another. Inline,
// because GCC takes calls of functions that only prefetch for calls without effect.
template <int kLocality, bool kToWrite = false, class OffsetOf>
[[gnu::always_inline]] inline void prefetch_rows(const Panel& panel, const View& view, int64 count,
                                                 OffsetOf offset) {
  constexpr int64 kLine = 64;
  const int64 size = view.type == Type::boolean ? 1
                     : view.type == Type::f64   ? 8
                     : view.type == Type::f32   ? 4
                                                : 2;
  const auto* const data = static_cast<const char*>(view.data);
  int64 before = 0;
  for (int lane = 0; lane < panel.rows; ++lane) {
    const int64 first = offset(lane);
    if (lane > 0 && first == before) continue;
    before = first;
    for (int64 byte = 0; byte < count * size; byte += kLine) {
      __builtin_prefetch(data + first * size + byte, kToWrite, kLocality);
    }
  }
}

// The rows of a panel of q, or of what has its shape.
template <int kLocality, bool kToWrite = false>
[[gnu::always_inline]] inline void prefetch_panel(const HeadContext& context, const Panel& panel,
                                                  const View& view, int64 dim) {
  if (!view.given()) return;
  prefetch_rows<kLocality, kToWrite>(panel, view, dim,
                                     [&](int lane) { return context.offset_q(view, panel, lane); });
}

// Calls work(i) for some panels, and prefetch(panel) one panel ahead. Rows that are transposed are
// read or written in pieces, whose order a core does not foresee. Where tile registers multiply
// nothing is prefetched: calls took up to 5 % longer with it.
template <class L, class SomePanel, class Prefetch, class Work>
[[gnu::always_inline]] inline void each_panel_ahead(const SomePanel* panels, int first, int end,
                                                    Prefetch prefetch, Work work) {
  if (!kHasTiles<L> && first < end) prefetch(panels[first]);
  for (int i = first; i < end; ++i) {
    if (!kHasTiles<L> && i + 1 < end) prefetch(panels[i + 1]);
    work(i);
  }
}

}  // namespace
}  // namespace regard
