// Staging: the elementwise terms of one panel and one block of keys, transposed so that the lanes
// are query rows. They say which pairs are visible, which dropout keeps, and what the bias adds.
#pragma once

#include "cpu/kernels/known_type.hpp"
#include "cpu/kernels/tile_keys.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class Real>
struct Stage {
  uint64* visible;
  uint64* kept;
  uint64* shown;
  uint64* changes;
  Real* bias;
  Real* mask;

  REGARD_INLINE Stage(char* scratch, const StageScratch& at)
      : visible(reinterpret_cast<uint64*>(scratch + at.visible)),
        kept(reinterpret_cast<uint64*>(scratch + at.kept)),
        shown(reinterpret_cast<uint64*>(scratch + at.shown)),
        changes(reinterpret_cast<uint64*>(scratch + at.changes)),
        bias(reinterpret_cast<Real*>(scratch + at.bias)),
        mask(reinterpret_cast<Real*>(scratch + at.mask)) {}
};

// One element of a bias or mask.
template <class L>
typename L::Real element_of(const View& view, int64 offset) {
  typename L::Real one[L::kLanes];
  L::store(one, L::load_as(view.type, view.data, offset, 1));
  return one[0];
}

// A vector of rows, transposed: to[key][panel]. Lane t's elements begin at offset[t].
template <class L, class SomeType>
void stage_rows(SomeType type, typename L::Real* to, const View& view,
                const int64 (&offset)[L::kLanes], int64 count) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  for (int64 j = 0; j < count; j += L::kLanes) {
    typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      tile[t] = L::load_as(type, view.data, offset[t] + j, count - j);
    }
    L::transpose(tile);
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      if (j + t < count) L::store(to + (j + t) * kWidth, tile[t]);
    }
  }
}

// The same for rows whose elements do not follow each other. They are loaded one at a time, except
// where all keys share them, or where the rows lie side by side in memory.
template <class L>
void stage_strided_rows(typename L::Real* to, const View& view, const int64 (&offset)[L::kLanes],
                        int64 count) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 step = view.strides.column;
  bool adjoin = true;
  for (int t = 1; t < L::kLanes; ++t) adjoin = adjoin && offset[t] == offset[0] + t;
  if (adjoin) {
    for (int64 j = 0; j < count; ++j) {
      L::store(to + j * kWidth, L::load_as(view.type, view.data, offset[0] + j * step, L::kLanes));
    }
    return;
  }
  typename L::Real lane[L::kLanes];
  for (int64 j = 0; j < count; ++j) {
    if (j == 0 || step != 0) {
      for (int t = 0; t < L::kLanes; ++t) lane[t] = element_of<L>(view, offset[t] + j * step);
    }
    L::store(to + j * kWidth, L::load(lane));
  }
}

// A bias or mask tile: to[key][panel].
template <class L>
void stage_tile(typename L::Real* to, const HeadContext& context, const Panel& panel,
                const View& view, Interval keys) {
  const int64 count = keys.end - keys.begin, step = view.strides.column;
  for (int v = 0; v < L::kVectors; ++v) {
    int64 offset[L::kLanes];
    for (int t = 0; t < L::kLanes; ++t) {
      const int lane = v * L::kLanes + t;
      offset[t] = offset_of(view.strides, context.b, panel.head[lane], 0, panel.query[lane]) +
                  keys.begin * step;
    }
    if (step != 1) {
      stage_strided_rows<L>(to + v * L::kLanes, view, offset, count);
      continue;
    }
    if (view.type == Type::boolean) {
      stage_rows<L>(KnownType<Type::boolean>(), to + v * L::kLanes, view, offset, count);
    } else {
      with_known(view.type,
                 [&](auto type) { stage_rows<L>(type, to + v * L::kLanes, view, offset, count); });
    }
  }
}

// Sets for each key the bits of the lanes that intervals let see it; all see the first `open`.
template <class L>
void stage_intervals(uint64* visible, const Panel& panel, Interval keys, int64 open) {
  using Real = typename L::Real;
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 count = keys.end - keys.begin;
  Real begin[kWidth], end[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) {
    begin[lane] = Real(clamp_to<int64>(panel.keys[lane].begin - keys.begin, 0, count));
    end[lane] = Real(clamp_to<int64>(panel.keys[lane].end - keys.begin, 0, count));
  }
  for (int64 j = 0; j < open; ++j) visible[j] = ~uint64(0);
  for (int64 j = open; j < count; ++j) {
    const auto key = L::set(Real(j));
    uint64 bits = 0;
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      const uint64 after = L::bits_of(L::less_equal(L::load(begin + v * L::kLanes), key));
      const uint64 before = L::bits_of(L::less(key, L::load(end + v * L::kLanes)));
      bits |= (after & before) << (v * L::kLanes);
    }
    visible[j] = bits;
  }
}

// Clears the bits of lanes whose spans do not show the key. Takes the n-th spans of all rows at
// once: bit `lane` of changes[j] flips where that lane's span begins or ends.
template <class Real>
void hide_by_row_spans(const Stage<Real>& stage, const HeadContext& context, const Panel& panel,
                       Interval keys) {
  const Problem& p = context.problem;
  const int64 count = keys.end - keys.begin;
  for (int64 j = 0; j < count; ++j) stage.shown[j] = 0;
  for (int n = 0; n < p.row_spans.count; ++n) {
    for (int64 j = 0; j <= count; ++j) stage.changes[j] = 0;
    for (int lane = 0; lane < panel.rows; ++lane) {
      const Interval span = spans_of(p.row_spans, context.b, panel.head[lane], context.seq.first_q,
                                     panel.query[lane])[n];
      const int64 begin = clamp_to<int64>(span.begin - keys.begin, 0, count);
      const int64 end = clamp_to<int64>(span.end - keys.begin, begin, count);
      stage.changes[begin] ^= uint64(1) << lane;
      stage.changes[end] ^= uint64(1) << lane;
    }
    uint64 inside = 0;
    for (int64 j = 0; j < count; ++j) stage.shown[j] |= inside ^= stage.changes[j];
  }
  for (int64 j = 0; j < count; ++j) stage.visible[j] &= stage.shown[j];
}

inline void hide_by_key_spans(uint64* visible, const HeadContext& context, const Panel& panel,
                              Interval keys) {
  const Problem& p = context.problem;
  for (int64 j = keys.begin; j < keys.end; ++j) {
    uint64 shown = 0;
    each_head(panel, [&](int64 head, int first, int end) {
      const Spans spans = spans_of(p.key_spans, context.b, head, context.seq.first_k, j);
      const int64 query = panel.query[first], rows = end - first;
      for (int n = 0; n < spans.count; ++n) {
        const int64 from = clamp_to<int64>(spans[n].begin - query, 0, rows);
        const int64 to = clamp_to<int64>(spans[n].end - query, from, rows);
        shown |= ((uint64(1) << (to - from)) - 1) << (first + from);
      }
    });
    visible[j - keys.begin] &= shown;
  }
}

// Bits of the lanes that a staged tile does not hide: value != hidden.
template <class L>
void hide_where(uint64* visible, const typename L::Real* tile, typename L::Real hidden,
                int64 count) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  for (int64 j = 0; j < count; ++j) {
    uint64 bits = 0;
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      bits |= L::bits_of(L::equal(L::load(tile + j * kWidth + v * L::kLanes), L::set(hidden)))
              << (v * L::kLanes);
    }
    visible[j] &= ~bits;
  }
}

// Bits of the lanes that dropout keeps: eight keys of every lane from one Philox call.
template <class L>
void stage_dropout(uint64* kept_bits, const HeadContext& context, const Panel& panel,
                   Interval keys) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const DropoutParams params = context.problem.dropout;
  const Positions& at = context.seq.positions;
  const int64 b = at.first_batch + context.b;
  uint32 row[kWidth], head[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) {
    row[lane] = uint32(at.of_row(panel.query[lane]));
    head[lane] = uint32(at.first_head + panel.head[lane]);
  }
  for (int64 stripe = keys.begin / 32 * 32; stripe < keys.end; stripe += 32) {
    for (int64 pair = 0; pair < 8; pair += 2) {
      const uint32 call = dropout_call(at.first_key + stripe + pair);
      uint32 number[8][kWidth];  // by slot
      for (int lane = 0; lane < kWidth; ++lane) {
        const Philox bits = dropout_bits(params, b, head[lane], row[lane], call);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
          number[2 * w][lane] = bits.word[w] & 0xffffu;
          number[2 * w + 1][lane] = bits.word[w] >> 16;
        }
      }
      for (int slot = 0; slot < 8; ++slot) {
        const int64 j = stripe + slot / 2 * 8 + pair + slot % 2;
        if (j < keys.begin || j >= keys.end) continue;
        uint64 bits = 0;
#pragma GCC unroll 4
        for (int v = 0; v < L::kVectors; ++v) {
          bits |= L::at_least(number[slot] + v * L::kLanes, params.threshold) << (v * L::kLanes);
        }
        kept_bits[j - keys.begin] = bits;
      }
    }
  }
}

// Fills the stage for the panel's tile, which has scores in `lanes` lanes; returns how many keys,
// from the first on, all of them see. stage.visible is filled if these are not all.
template <class L>
int64 stage_block(const Stage<typename L::Real>& stage, const HeadContext& context,
                  const Panel& panel, int lanes = L::kLanes * L::kVectors) {
  using Real = typename L::Real;
  const Features on = context.problem.features;
  const auto& [keys, mask_hides, row_spans_hide, key_spans_hide] = panel.tile;
  const int64 count = keys.end - keys.begin;
  // Unused lanes are hidden, because their zeros times an infinite key would be NaN.
  const bool pairs_hide =
      panel.rows < lanes || mask_hides || row_spans_hide || key_spans_hide || on.bias;
  const int64 open = pairs_hide || panel.common.begin > keys.begin
                         ? 0
                         : clamp_to<int64>(panel.common.end - keys.begin, 0, count);
  if (open < count) stage_intervals<L>(stage.visible, panel, keys, open);
  if (row_spans_hide) hide_by_row_spans(stage, context, panel, keys);
  if (key_spans_hide) hide_by_key_spans(stage.visible, context, panel, keys);
  if (mask_hides) {
    stage_tile<L>(stage.mask, context, panel, context.problem.mask, keys);
    hide_where<L>(stage.visible, stage.mask, Real(0), count);
  }
  if (on.bias) {
    stage_tile<L>(stage.bias, context, panel, context.problem.bias, keys);
    hide_where<L>(stage.visible, stage.bias, -Real(__builtin_huge_val()), count);
  }
  if (on.dropout) stage_dropout<L>(stage.kept, context, panel, keys);
  return open;
}

// The problem's scale and softcap, in the arithmetic of the lanes.
template <class L>
ScoreParams<typename L::Real> score_params(const Problem& p) {
  if constexpr (sizeof(typename L::Real) == 4) {
    return narrowed_params(p.score);
  } else {
    return p.score;
  }
}

// What the scores of one panel need of the problem.
template <class L>
struct ScoreTerms {
  using Real = typename L::Real;
  Features on;
  ScoreParams<Real> params;
  Real unit;  // of every logit
  Real keep_scale;
  HeadTermsOfLanes<L, kMaxPanel> heads;
  Real position[kMaxPanel];  // of key 0, relative to each lane's query

  ScoreTerms(const HeadContext& context, const Panel& panel) {
    const Problem& p = context.problem;
    on = p.features;
    params = score_params<L>(p);
    unit = logit_unit(on, params);
    keep_scale = Real(regard::keep_scale(p.dropout));
    if (!has_head_terms(on)) return;
    const Sequence& s = context.seq;
    for (int lane = 0; lane < L::kLanes * L::kVectors; ++lane) {
      heads.set(lane, on, p, context.b, panel.head[lane]);
      position[lane] = relative_position<Real>(s, panel.query[lane], 0);
    }
  }

  // The logit's value for vector v of the panel.
  REGARD_INLINE typename L::Vec value(typename L::Vec raw, typename L::Vec bias, int v,
                                      int64 key) const {
    auto at = L::set(0);
    if (has_head_terms(on)) at = L::sub(L::load(position + v * L::kLanes), L::set(Real(key)));
    return score<L>(on, params, raw, bias, heads.load(on, v * L::kLanes), at).value;
  }
};

}  // namespace
}  // namespace regard
