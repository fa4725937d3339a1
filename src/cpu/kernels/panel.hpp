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

// Fills `panels` from `rows` rows of the kv head's row space; returns how many it filled.
template <class L, class SomePanel>
int make_panels(SomePanel* panels, const HeadContext& context, int64 first, int64 rows) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const Problem& p = context.problem;
  const Sequence& s = context.seq;
  const int64 group = p.sizes.group();
  const bool spans = p.features.row_spans;
  int count = 0;
  for (int64 at = 0; at < rows; at += kWidth, ++count) {
    Panel& panel = panels[count];
    panel.first = first + at;
    panel.rows = int(smaller<int64>(kWidth, rows - at));
    panel.seen.clear();
    panel.common = {0, s.len_k};
    panel.mask = {};
    int64 head = context.kv * group + panel.first / s.len_q, query = panel.first % s.len_q;
    Interval all;
    for (int lane = 0; lane < panel.rows; ++lane) {
      panel.head[lane] = head;
      panel.query[lane] = query;
      Interval& keys = panel.keys[lane] = visible_keys(p.mask_params, s, query);
      if (spans) keys = keys_in_spans_of_row(context, head, query, keys, panel.seen);
      all = hull(all, keys);
      panel.common = intersection(panel.common, keys);
      if (++query == s.len_q) ++head, query = 0;
    }
    if (!spans) panel.seen.add(all);
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
template <int kLocality, class OffsetOf>
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
      __builtin_prefetch(data + first * size + byte, 0, kLocality);
    }
  }
}

// ---------------------------------------------------------------------------------------- packing

// Calls pack.operator()<Term>(n) for each term of an element: loads of the lanes `Term` make the
// n-th.
template <class L, class Pack>
void each_term(Pack pack) {
  pack.template operator()<typename TermsOf<L>::template Term<0>>(0);
  if constexpr (kTerms<L> > 1) pack.template operator()<typename TermsOf<L>::template Term<1>>(1);
}

// Rows of a tensor as Units along the row: vectors of to[row][width], zeros after the row's end.
template <class L>
void pack_rows(typename L::Unit* to, int64 width, const HeadContext& context, const View& view,
               int64 dim, int64 first, int64 rows) {
  for (int64 row = 0; row < rows; ++row) {
    const int64 offset = context.offset_k(view, first + row);
    for (int64 d = 0; d < width; d += L::kLanes) {
      typename L::Vec x;
      if constexpr (L::kPack == 1) {
        x = L::load_as(view.type, view.data, offset + d, dim - d);
      } else {
        x = L::load_row_units(view.type, view.data, offset + 2 * d, dim - 2 * d);
      }
      L::store(reinterpret_cast<typename L::Real*>(to + vector_at<L>(row, d, width)), x);
    }
  }
}

// Where a row that is not there begins; offsets may be negative.
inline constexpr int64 kNoRow = -int64(~uint64(0) >> 1);

// Units across two rows, from element d on; either may be kNoRow.
template <class L>
REGARD_INLINE typename L::Vec load_pairs(const View& view, int64 dim, int64 d, int64 even,
                                         int64 odd) {
  return L::load_pairs(view.type, view.data, even == kNoRow ? 0 : even + d,
                       odd == kNoRow ? 0 : odd + d, even == kNoRow ? 0 : dim - d,
                       odd == kNoRow ? 0 : dim - d);
}

// Rows of a tensor as Units across rows: vectors of to[row / pack][width]. The partner of a last
// odd row is zeros. offset(row) is where a row begins, or kNoRow.
template <class L, class OffsetOf>
void pack_pairs(typename L::Unit* to, int64 width, const View& view, int64 dim, int64 rows,
                OffsetOf offset) {
  for (int64 row = 0; row < rows; row += L::kPack) {
    const auto out = [&](int64 d) {
      return reinterpret_cast<typename L::Real*>(to + vector_at<L>(row / L::kPack, d, width));
    };
    const int64 even = offset(row);
    if constexpr (L::kPack == 1) {
      for (int64 d = 0; d < width; d += L::kLanes) {
        L::store(out(d),
                 even == kNoRow ? L::set(0) : L::load_as(view.type, view.data, even + d, dim - d));
      }
    } else {
      const int64 odd = row + 1 < rows ? offset(row + 1) : kNoRow;
      const bool whole = view.type == Type::bf16 && even != kNoRow && odd != kNoRow;
      const auto* const data = static_cast<const uint16*>(view.data);
      int64 d = 0;
      for (; whole && d + 2 * L::kLanes <= dim; d += 2 * L::kLanes) {
        L::store(out(d), L::half_of_pairs(data + even + d, data + odd + d, false));
        L::store(out(d + L::kLanes), L::half_of_pairs(data + even + d, data + odd + d, true));
      }
      for (; d < width; d += L::kLanes) {
        L::store(out(d), load_pairs<L>(view, dim, d, even, odd));
      }
    }
  }
}

// 32 rows of 32 bf16, transposed, into a tile and the one below it, which begins `below` Units on.
template <class L>
void pack_whole_tile(typename L::Unit* to, int64 below, const View& view, int64 d,
                     const int64* begin) {
  const auto* const data = static_cast<const uint16*>(view.data) + d;
#pragma GCC unroll 2
  for (int upper = 0; upper < 2; ++upper) {
    typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      tile[t] = L::interleaved(data + begin[2 * t], data + begin[2 * t + 1], upper);
    }
    L::transpose(tile);
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      const int64 element = t / 4 * 8 + upper * 4 + t % 4;
      auto* const out = to + element / L::kLanes * below + element % L::kLanes * L::kLanes;
      L::store(reinterpret_cast<typename L::Real*>(out), tile[t]);
    }
  }
}

// What pack_pairs makes, transposed, for products that take rows alone: tiles of 16 elements of
// `dim` by 16 Units, dense; row_units of a row of tiles. Zeros after the last row, up to a whole
// tile.
template <class L, class OffsetOf>
void pack_columns(typename L::Unit* to, int64 row_units, const View& view, int64 dim, int64 rows,
                  OffsetOf offset) {
  for (int64 row = 0; row < rows; row += kTileElements<L>) {
    int64 begin[kTileElements<L>];
    for (int64 r = 0; r < kTileElements<L>; ++r)
      begin[r] = row + r < rows ? offset(row + r) : kNoRow;
    const bool whole = view.type == Type::bf16 && row + kTileElements<L> <= rows;
    auto* const tiles = to + row / L::kPack * L::kLanes;
    int64 d = 0;
    for (; whole && d + kTileElements<L> <= dim; d += kTileElements<L>) {
      pack_whole_tile<L>(tiles + d * row_units, L::kLanes * row_units, view, d, begin);
    }
    for (; d < dim; d += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        tile[t] = load_pairs<L>(view, dim, d, begin[2 * t], begin[2 * t + 1]);
      }
      L::transpose(tile);
      auto* const out = reinterpret_cast<typename L::Real*>(tiles + d * row_units);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) L::store(out + t * L::kLanes, tile[t]);
    }
  }
}

// Rows packed as A of a product whose k is the rows: Units across rows, which the product walks by
// columns, or which are transposed for tiles.
template <class L>
struct AcrossRows {
  static constexpr Walk kWalk = kHasTiles<L> ? Walk::rows : Walk::columns;
  static constexpr bool kInTiles = kHasTiles<L>;
  const typename L::Unit* units;
  int64 stride;

  AcrossRows(const typename L::Unit* memory, const CpuShape& shape, int64 dim, int64 most_rows)
      : units(memory),
        stride(kHasTiles<L> ? regard::units(shape, most_rows) : padded(shape, dim)) {}
  // Rows of a tensor that are Units as they lie.
  AcrossRows(const typename L::Unit* rows, int64 row_stride) : units(rows), stride(row_stride) {}

  // `to`: the memory that this was made with.
  template <class OffsetOf>
  void pack(typename L::Unit* to, const View& view, int64 dim, int64 rows, OffsetOf offset) const {
    if constexpr (kHasTiles<L>) {
      pack_columns<L>(to, stride, view, dim, rows, offset);
    } else {
      pack_pairs<L>(to, stride, view, dim, rows, offset);
    }
  }
  // Where a row begins; in tiles, the first one of a tile.
  REGARD_INLINE const typename L::Unit* from(int64 row) const {
    return units + row / L::kPack * (kInTiles ? L::kLanes : stride);
  }
};

// Zeros from the pair after `rows` rows to the end of the tile, in one vector of Units across rows.
template <class L>
REGARD_INLINE void clear_last_tile(typename L::Unit* units, int64 width, int64 rows) {
  if constexpr (kHasTiles<L>) {
    for (int64 r = round_up(rows, L::kPack); r < round_up(rows, kTileElements<L>); r += L::kPack) {
      L::store(reinterpret_cast<typename L::Real*>(units + r / L::kPack * width), L::set(0));
    }
  }
}

// The panel's rows, transposed: to[unit][panel], zeros in lanes that are not in use. Only the first
// `vectors` vectors are written.
template <class L>
void pack_lanes(typename L::Unit* to, const HeadContext& context, const Panel& panel,
                const View& view, int64 dim, int vectors = L::kVectors) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 units = divide_up(dim, L::kPack);
  for (int v = 0; v < vectors; ++v) {
    int64 offset[L::kLanes];
    for (int t = 0; t < L::kLanes; ++t) {
      offset[t] = context.offset_q(view, panel, v * L::kLanes + t);
    }
    // Whole tiles of pairs are read without a mask.
    const bool whole = L::kPack > 1 && view.type == Type::bf16 &&
                       dim % (L::kLanes * L::kPack) == 0 && (v + 1) * L::kLanes <= panel.rows;
    for (int64 u = 0; u < units; u += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes && whole; ++t) {
        const auto* const row = static_cast<const uint16*>(view.data) + offset[t] + L::kPack * u;
        tile[t] = L::load(reinterpret_cast<const typename L::Real*>(row));
      }
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes && !whole; ++t) {
        const bool used = v * L::kLanes + t < panel.rows;
        if constexpr (L::kPack == 1) {
          tile[t] = used ? L::load_as(view.type, view.data, offset[t] + u, dim - u) : L::set(0);
        } else {
          tile[t] = used ? L::load_row_units(view.type, view.data, offset[t] + 2 * u, dim - 2 * u)
                         : L::set(0);
        }
      }
      L::transpose(tile);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        L::store(reinterpret_cast<typename L::Real*>(to + (u + t) * kWidth + v * L::kLanes),
                 tile[t]);
      }
    }
  }
}

// The lanes (as bits) in which some element of sums[dim][panel] is not finite.
template <class L>
uint64 nonfinite_lanes(const typename L::Real* sums, const Panel& panel, int64 dim) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  uint64 finite = ~uint64(0);
  for (int v = 0; v < vectors_of<L>(panel); ++v) {
    typename L::Vec zero[4];  // x - x is 0 for every finite x, and NaN for the others
#pragma GCC unroll 4
    for (auto& sum : zero) sum = L::set(0);
    for (int64 d = 0; d < dim; d += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto x = L::load(sums + smaller(d + i, dim - 1) * kWidth + v * L::kLanes);
        zero[i] = L::add(zero[i], L::sub(x, x));
      }
    }
    const auto zeros = L::add(L::add(zero[0], zero[1]), L::add(zero[2], zero[3]));
    const uint64 lanes = ((uint64(1) << L::kLanes) - 1) << (v * L::kLanes);
    finite &= ~lanes | L::bits_of(L::equal(zeros, L::set(0))) << (v * L::kLanes);
  }
  return ~finite & ((uint64(1) << panel.rows) - 1);
}

// Writes sums[dim][panel], each lane times factor[lane], to rows of bf16. Pairs are rounded before
// they are transposed.
template <class L>
void store_rounded_lanes(const typename L::Real* sums, const typename L::Real* factor,
                         const HeadContext& context, const Panel& panel, const View& view,
                         int64 dim) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  for (int v = 0; v < vectors_of<L>(panel); ++v) {
    const auto scale = L::load(factor + v * L::kLanes);
    const int rows = int(smaller<int64>(L::kLanes, panel.rows - v * L::kLanes));
    int64 offset[L::kLanes];
    for (int t = 0; t < rows; ++t) {
      offset[t] = context.offset_q(view, panel, v * L::kLanes + t);
    }
    const auto scaled = [&](int64 d) {
      return L::mul(L::load(sums + smaller(d, dim - 1) * kWidth + v * L::kLanes), scale);
    };
    for (int64 d = 0; d < dim; d += L::kLanes * L::kPack) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        tile[t] = L::rounded_pairs(scaled(d + 2 * t), scaled(d + 2 * t + 1));
      }
      L::transpose(tile);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        if (t < rows) L::store_row_units(view.data, offset[t] + d, dim - d, tile[t]);
      }
    }
  }
}

// Writes sums[dim][panel], each lane times factor[lane], to the rows of a tensor, and adds what
// they hold times held[lane], which is not read where that is 0 or held is null. Lanes in `skip`
// are left as they are.
template <class L>
void store_lanes(const typename L::Real* sums, const typename L::Real* factor,
                 const HeadContext& context, const Panel& panel, const View& view, int64 dim,
                 const typename L::Real* held, uint64 skip) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  if constexpr (L::kPack > 1) {
    if (view.type == Type::bf16 && !held && skip == 0) {
      return store_rounded_lanes<L>(sums, factor, context, panel, view, dim);
    }
  }
  for (int v = 0; v < vectors_of<L>(panel); ++v) {
    const auto scale = L::load(factor + v * L::kLanes);
    const int first = v * L::kLanes, rows = smaller(L::kLanes, panel.rows - first);
    int64 offset[L::kLanes];
    for (int t = 0; t < rows; ++t) offset[t] = context.offset_q(view, panel, first + t);
    for (int64 d = 0; d < dim; d += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        const int64 row = smaller(d + t, dim - 1);
        tile[t] = L::mul(L::load(sums + row * kWidth + first), scale);
      }
      L::transpose(tile);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        const int lane = first + t;
        if (t >= rows || (skip >> lane & 1)) continue;
        auto x = tile[t];
        if (held && held[lane] != 0) {
          const auto had = L::load_as(view.type, view.data, offset[t] + d, dim - d);
          x = L::fma(had, L::set(held[lane]), x);
        }
        L::store_as(view.type, view.data, offset[t] + d, dim - d, x);
      }
    }
  }
}

}  // namespace
}  // namespace regard
