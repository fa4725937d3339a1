// The keys of a block that a panel has to visit. Keys that intervals, spans, the mask or a bias of
// -inf hide from every row cost no products; keys that they show to every row cost no test of each
// pair.
#pragma once

#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

// What a mask shows of the pairs that were looked at.
struct Shown {
  bool some = false;
  bool all = true;
};
REGARD_INLINE void look_at(Shown& shown, const uint8* mask, int64 count, int64 step) {
  uint8 any = 0, every = 1;
  if (step == 1) {
    for (int64 j = 0; j < count; ++j) {
      any |= mask[j];
      every &= uint8(mask[j] != 0);
    }
  } else {
    for (int64 j = 0; j < count; ++j) {
      any |= mask[j * step];
      every &= uint8(mask[j * step] != 0);
    }
  }
  shown.some = shown.some || any;
  shown.all = shown.all && every;
}

// Calls look(offset of the first key) for each row of the panel, until it returns true. Rows that
// follow one another and share their elements are looked at once.
template <class Look>
bool any_row(const HeadContext& context, const Panel& panel, const View& view, Interval keys,
             Look look) {
  int64 before = 0;
  for (int lane = 0; lane < panel.rows; ++lane) {
    const int64 offset =
        offset_of(view.strides, context.b, panel.head[lane], 0, panel.query[lane]) +
        keys.begin * view.strides.column;
    if (lane > 0 && offset == before) continue;
    if (look(offset)) return true;
    before = offset;
  }
  return false;
}

// The rows of a mask or a bias lie far apart: without a hint, each of their cache lines is waited
// for.
[[gnu::always_inline]] inline void prefetch_keys(const HeadContext& context, const Panel& panel,
                                                 const View& view, Interval keys) {
  if (view.strides.column != 1) return;
  prefetch_rows<3>(panel, view, keys.end - keys.begin, [&](int lane) {
    return offset_of(view.strides, context.b, panel.head[lane], 0, panel.query[lane]) + keys.begin;
  });
}

// The keys that a loop visits, block by block. A block begins at a multiple of `size`.
struct KeyBlocks {
  Interval keys;
  int64 size;
  BlockSets<> rows_of_keys{};  // forward: what is known of the spans of each block's keys

  REGARD_INLINE int64 of(int64 key) const { return key / size; }
  REGARD_INLINE int64 begin(int64 n) const { return n * size; }
  REGARD_INLINE int64 end() const { return divide_up(keys.end, size); }
  REGARD_INLINE Interval at(int64 n) const {
    return {larger(begin(n), keys.begin), smaller(begin(n + 1), keys.end)};
  }
};

// The first block from `n` on of which one of the panels may see a key; at least blocks.end() if
// there is none.
inline int64 next_block(const Panel* panels, int count, const KeyBlocks& blocks, int64 n) {
  int64 next = kNone;
  for (int i = 0; i < count && next > n; ++i) {
    const Panel& panel = panels[i];
    next = smaller(next, next_keys(blocks, blocks.rows_of_keys, panel.seen,
                                   queries_of(panel, 0, panel.rows), n));
  }
  return next;
}

// Reads the mask of a block and of those after it, row by row, because memory is read fastest in
// its order; no further than where all of them turn out mixed.
inline void read_mask(MaskBits& bits, const HeadContext& context, const Panel& panel,
                      const KeyBlocks& blocks, int64 first) {
  constexpr int64 kMost = 32, kShortRow = 512;  // bytes; longer rows are prefetched anyway
  const View& mask = context.problem.mask;
  const auto* const data = static_cast<const uint8*>(mask.data);
  const Interval seen = intersection(blocks.keys, panel.seen.all());
  const KeyBlocks visible{seen, blocks.size};
  const int64 last = smaller(first + kMost, visible.end());
  const uint32 whole = last - first == kMost ? ~uint32(0) : (uint32(1) << (last - first)) - 1;
  bits = {{first, last}, 0, whole};
  const Interval all{visible.at(first).begin, visible.at(last - 1).end};
  if (all.end - all.begin <= kShortRow) prefetch_keys(context, panel, mask, all);
  any_row(context, panel, mask, {0, 0}, [&](int64 offset) {
    for (int64 n = first; n < last; ++n) {
      const Interval keys = visible.at(n);
      Shown shown;
      look_at(shown, data + offset + keys.begin * mask.strides.column, keys.end - keys.begin,
              mask.strides.column);
      const uint32 bit = uint32(1) << (n - first);
      if (shown.some) bits.some |= bit;
      if (!shown.all) bits.all &= ~bit;
    }
    return (bits.some & ~bits.all) == whole;
  });
}

inline Shown shown_by_mask(const HeadContext& context, Panel& panel, const KeyBlocks& blocks,
                           Interval keys) {
  const int64 n = blocks.of(keys.begin);
  MaskBits& bits = panel.mask;
  if (n < bits.blocks.begin || n >= bits.blocks.end) read_mask(bits, context, panel, blocks, n);
  const uint32 bit = uint32(1) << (n - bits.blocks.begin);
  return {(bits.some & bit) != 0, (bits.all & bit) != 0};
}

// Moves `from` towards `to`, by steps of one key, as long as the mask hides the keys passed.
inline int64 pass_hidden(const uint8* row, int64 column, int64 from, int64 to) {
  constexpr int64 kWord = 8;
  const auto hides_word = [&](int64 key) {
    uint64 word;
    __builtin_memcpy(&word, row + key, kWord);
    return word == 0;
  };
  if (from <= to) {
    while (column == 1 && from + kWord <= to && hides_word(from)) from += kWord;
    while (from < to && row[from * column] == 0) ++from;
  } else {
    while (column == 1 && from - kWord >= to && hides_word(from - kWord)) from -= kWord;
    while (from > to && row[(from - 1) * column] == 0) --from;
  }
  return from;
}

// From the first to the last of the keys that the mask shows to some of the panel's rows.
inline Interval seen_by_mask(const HeadContext& context, const Panel& panel, Interval keys) {
  const View& mask = context.problem.mask;
  Interval seen{keys.end, keys.begin};
  any_row(context, panel, mask, {0, 0}, [&](int64 offset) {
    const uint8* const row = static_cast<const uint8*>(mask.data) + offset;
    seen = {pass_hidden(row, mask.strides.column, keys.begin, seen.begin),
            pass_hidden(row, mask.strides.column, keys.end, seen.end)};
    return seen.begin == keys.begin && seen.end == keys.end;
  });
  return seen;
}

inline bool mask_shows_all(const HeadContext& context, const Panel& panel, Interval keys) {
  const View& mask = context.problem.mask;
  return !any_row(context, panel, mask, keys, [&](int64 offset) {
    Shown shown;
    look_at(shown, static_cast<const uint8*>(mask.data) + offset, keys.end - keys.begin,
            mask.strides.column);
    return !shown.all;
  });
}

// From the first to the last of the keys that spans of the panel's rows show.
inline Interval seen_by_row_spans(const HeadContext& context, const Panel& panel, Interval keys) {
  const Problem& p = context.problem;
  Interval seen;
  for (int lane = 0; lane < panel.rows; ++lane) {
    const Spans spans =
        spans_of(p.row_spans, context.b, panel.head[lane], context.seq.first_q, panel.query[lane]);
    for (int n = 0; n < spans.count; ++n) seen = hull(seen, intersection(spans[n], keys));
  }
  return seen;
}

// Whether one of the spans shows all of x. Several may do so together, which does not count.
REGARD_INLINE bool one_shows(const Spans& spans, Interval x) {
  for (int n = 0; n < spans.count; ++n) {
    if (spans[n].begin <= x.begin && x.end <= spans[n].end) return true;
  }
  return false;
}

inline bool row_spans_show_all(const HeadContext& context, const Panel& panel, Interval keys) {
  const Problem& p = context.problem;
  for (int lane = 0; lane < panel.rows; ++lane) {
    const Spans spans =
        spans_of(p.row_spans, context.b, panel.head[lane], context.seq.first_q, panel.query[lane]);
    if (!one_shows(spans, keys)) return false;
  }
  return true;
}

// The smallest and the largest ends of one span of keys that follow one another.
struct SpanEnds {
  int32 first_begin, last_begin, first_end, last_end;
};
// kStep: the elements from one key to the next, if it is known, so that many are looked at at once.
template <int kStep>
SpanEnds ends_of(const int32* ends, int64 count, int64 step) {
  int32 first_begin = ends[0], last_begin = ends[0], first_end = ends[1], last_end = ends[1];
  for (int64 j = 0; j < count; ++j) {
    const int64 at = j * (kStep > 0 ? kStep : step);
    const int32 begin = ends[at], end = ends[at + 1];
    first_begin = begin < first_begin ? begin : first_begin;
    last_begin = begin > last_begin ? begin : last_begin;
    first_end = end < first_end ? end : first_end;
    last_end = end > last_end ? end : last_end;
  }
  return {first_begin, last_begin, first_end, last_end};
}
// What the ends alone say: the spans of no key reach the queries, or one span of each holds them.
struct Reached {
  bool none = true, all = false;
};
inline Reached reached_by(const Spans& first, int64 count, int64 step, Interval queries) {
  Reached reached;
  for (int n = 0; n < first.count; ++n) {
    const int32* const from = first.ends + 2 * n;
    const SpanEnds ends = step == 2 ? ends_of<2>(from, count, step) : ends_of<0>(from, count, step);
    if (ends.first_begin < queries.end && queries.begin < ends.last_end) reached.none = false;
    if (ends.last_begin <= queries.begin && queries.end <= ends.first_end) reached.all = true;
  }
  return reached;
}

inline Reached reached_by(const HeadContext& context, int64 head, Interval keys, Interval queries) {
  const SpanView& spans = context.problem.key_spans;
  return reached_by(spans_of(spans, context.b, head, context.seq.first_k, keys.begin),
                    keys.end - keys.begin, spans.view.strides.row, queries);
}

// From the first to the last of the keys that are shown to one of the queries.
inline Interval reached_keys(const HeadContext& context, int64 head, Interval keys,
                             Interval queries) {
  const Reached reached = reached_by(context, head, keys, queries);
  if (reached.none) return {};
  if (reached.all) return keys;
  const auto reaches = [&](int64 j) {
    const Spans spans =
        spans_of(context.problem.key_spans, context.b, head, context.seq.first_k, j);
    for (int n = 0; n < spans.count; ++n) {
      if (!intersection(spans[n], queries).empty()) return true;
    }
    return false;
  };
  while (!keys.empty() && !reaches(keys.begin)) ++keys.begin;
  while (!keys.empty() && !reaches(keys.end - 1)) --keys.end;
  return keys;
}

inline Interval seen_by_key_spans(const HeadContext& context, const Panel& panel, Interval keys) {
  Interval seen;
  each_head(panel, [&](int64 head, int first, int end) {
    seen = hull(seen, reached_keys(context, head, keys, queries_of(panel, first, end)));
  });
  return seen;
}

inline bool key_spans_show_all(const HeadContext& context, const Panel& panel, Interval keys) {
  const SpanView& key_spans = context.problem.key_spans;
  bool all = true;
  each_head(panel, [&](int64 head, int first, int end) {
    const Interval queries = queries_of(panel, first, end);
    if (!all || reached_by(context, head, keys, queries).all) return;
    for (int64 j = keys.begin; all && j < keys.end; ++j) {
      all = one_shows(spans_of(key_spans, context.b, head, context.seq.first_k, j), queries);
    }
  });
  return all;
}

// Whether some element of a row of the bias is not -inf.
template <class L>
bool shows_some(const View& bias, int64 offset, int64 count) {
  const auto hidden = L::set(-typename L::Real(__builtin_huge_val()));
  const int64 step = bias.strides.column, width = step == 1 ? L::kLanes : 1;
  if (step == 0) count = smaller<int64>(count, 1);
  for (int64 j = 0; j < count; j += width) {
    const auto x = L::load_as(bias.type, bias.data, offset + j * step, smaller(width, count - j));
    const uint64 looked_at = (uint64(1) << smaller(width, count - j)) - 1;
    if (~L::bits_of(L::equal(x, hidden)) & looked_at) return true;
  }
  return false;
}

template <class L>
bool shown_by_bias(const HeadContext& context, const Panel& panel, Interval keys) {
  const View& bias = context.problem.bias;
  return any_row(context, panel, bias, keys,
                 [&](int64 offset) { return shows_some<L>(bias, offset, keys.end - keys.begin); });
}

// Whole Units of the block that hold the keys; where products take tiles, whole tiles.
template <class L>
REGARD_INLINE Interval whole_units(Interval block, Interval keys) {
  constexpr int64 kStep = kHasTiles<L> ? kTileElements<L> : L::kPack;
  if (keys.empty()) return {};
  const int64 begin = keys.begin - (keys.begin - block.begin) % kStep;
  if (!kHasTiles<L>) return {begin, keys.end};
  return {begin, smaller(block.end, begin + round_up(keys.end - begin, kStep))};
}

// From the first to the last key of the block that intervals and spans leave.
inline Interval keys_in_spans(const HeadContext& context, const Panel& panel, Interval block) {
  const Features& on = context.problem.features;
  Interval keys = panel.seen.within(block);
  if (on.row_spans && !keys.empty()) keys = seen_by_row_spans(context, panel, keys);
  if (on.key_spans && !keys.empty()) keys = seen_by_key_spans(context, panel, keys);
  return keys;
}

// Sets the panel's tile of a block; returns whether it has keys.
template <class L>
bool set_tile(Panel& panel, const HeadContext& context, const KeyBlocks& blocks, Interval block) {
  const Problem& p = context.problem;
  const Features& on = p.features;
  TileKeys& tile = panel.tile;
  const auto sees_none = [&] {
    tile.keys = {};
    return false;
  };
  tile.mask = tile.row_spans = tile.key_spans = false;
  tile.keys = whole_units<L>(block, keys_in_spans(context, panel, block));
  if (tile.keys.empty()) return false;
  if (on.bias) {
    const Interval next{block.end, 2 * block.end - block.begin};
    prefetch_keys(context, panel, p.bias, whole_units<L>(next, panel.seen.within(next)));
  }
  if (on.mask) {
    const Shown shown = shown_by_mask(context, panel, blocks, tile.keys);
    if (!shown.some) return sees_none();
    if (!shown.all) {
      tile.keys = whole_units<L>(block, seen_by_mask(context, panel, tile.keys));
      if (tile.keys.empty()) return false;
      tile.mask = !mask_shows_all(context, panel, tile.keys);
    }
  }
  if (on.bias && !shown_by_bias<L>(context, panel, tile.keys)) return sees_none();
  // The only span of a row is a part of its interval.
  tile.row_spans =
      on.row_spans && p.row_spans.count > 1 && !row_spans_show_all(context, panel, tile.keys);
  tile.key_spans = on.key_spans && !key_spans_show_all(context, panel, tile.keys);
  return true;
}

// Sets each panel's tile of the block; returns whether one of them has keys.
template <class L, class SomePanel>
bool set_tiles(SomePanel* panels, int count, const HeadContext& context, const KeyBlocks& blocks,
               Interval block) {
  bool any = false;
  for (int i = 0; i < count; ++i) {
    any = set_tile<L>(panels[i], context, blocks, block) || any;
  }
  return any;
}

}  // namespace
}  // namespace regard
