// The softmax of a few rows. A vector holds the scores of some keys with all of the rows, so that
// no lane is empty: lane l is row l % kRows and key l / kRows of the vector's keys.
#pragma once

#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class L, int kRows>
class FewSoftmax {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  static constexpr int kWidth = L::kLanes * L::kVectors;  // of a panel, which stages features

 public:
  static constexpr int kKeys = L::kLanes / kRows;  // of a vector

  // `max` and `sum`: of each of the panel's rows, before the first key. `slack`: how far a value
  // may exceed its row's maximum.
  FewSoftmax(const HeadContext& context, const Stage<Real>& stage, const Panel& panel,
             Real exponent, Real slack, const Real* max, const Real* sum)
      : context_(context),
        stage_(stage),
        terms_(terms_of(context, panel)),
        exponent_(L::set(exponent)),
        slack_(L::set(slack)) {
    Real max_of[L::kLanes], sum_of[L::kLanes];
    for (int lane = 0; lane < L::kLanes; ++lane) {
      max_of[lane] = max[lane % kRows];
      sum_of[lane] = lane < kRows ? sum[lane] : Real(0);
    }
    row_ = {L::load(max_of), L::load(sum_of)};
  }

  // Turns the raw products of the panel's keys into values, and raises the rows' maxima where one
  // exceeds them by more than the slack. Returns whether it did; if so, shrink[row] is the factor
  // of what was summed before.
  bool settle(const Panel& panel, Real* scores, Real* shrink) {
    const int64 open = stage_block<L>(stage_, context_, panel, panel.rows);
    const Vec max = row_max(finish_scores(scores, panel.tile.keys, open));
    if (L::bits_of(L::less(L::add(row_.max, slack_), max)) == 0) return false;
    const Vec factor = raise_max<L>(row_, max, exponent_);
    tile_sum_ = L::mul(tile_sum_, factor);
    L::store(shrink, factor);
    return true;
  }

  // From values to weights.
  void weigh(const Panel& panel, Real* scores) {
    const Vec base = subtractable<L>(row_.max);
    const int64 count = panel.tile.keys.end - panel.tile.keys.begin;
    Vec sum = L::set(0);
    for (int64 j = 0; j < count; j += kKeys) {
      Real* const at = scores + j * kRows;
      Vec weight = weight_of<L>(L::load(at), base, exponent_);
      sum = L::add(sum, weight);
      if (terms_.on.dropout) {
        weight = L::select(lanes_of(stage_.kept, j, 0, count), weight, L::set(0));
      }
      L::store(at, weight);
    }
    tile_sum_ = L::add(tile_sum_, sum);
  }

  void end_tile() {
    row_.sum = L::add(row_.sum, tile_sum_);
    tile_sum_ = L::set(0);
  }

  // The rows' maxima and sums after the last tile.
  void end(Real* max, Real* sum, int rows) const {
    Real max_of[L::kLanes], sum_of[L::kLanes];
    L::store(max_of, row_.max);
    L::store(sum_of, row_.sum);
    for (int lane = kRows; lane < L::kLanes; ++lane) sum_of[lane % kRows] += sum_of[lane];
    for (int row = 0; row < rows; ++row) {
      max[row] = max_of[row];
      sum[row] = sum_of[row];
    }
  }

 private:
  // The score terms of the panel, whose rows are repeated until they fill a vector.
  static ScoreTerms<L> terms_of(const HeadContext& context, Panel panel) {
    for (int lane = kRows; lane < L::kLanes; ++lane) {
      panel.head[lane] = panel.head[lane % kRows];
      panel.query[lane] = panel.query[lane % kRows];
    }
    ScoreTerms<L> terms(context, panel);
    for (int lane = 0; lane < L::kLanes && has_head_terms(terms.on); ++lane) {
      terms.position[lane] -= Real(lane / kRows);
    }
    return terms;
  }

  // The lanes of a vector, which begins with key j, whose pairs have their bits set; keys before
  // `open` count as if they had, and keys from `count` on as if they had not.
  static typename L::Mask lanes_of(const uint64* bits, int64 j, int64 open, int64 count) {
    constexpr uint64 kAll = (uint64(1) << kRows) - 1;
    uint64 lanes = 0;
    for (int64 t = smaller<int64>(kKeys, count - j) - 1; t >= 0; --t) {
      lanes = lanes << kRows | (j + t < open ? kAll : bits[j + t] & kAll);
    }
    return L::mask_of(lanes);
  }

  Vec bias_of(int64 j, int64 count) const {
    if (!terms_.on.bias) return L::set(0);
    Real bias[L::kLanes];
    for (int lane = 0; lane < L::kLanes; ++lane) {
      bias[lane] = stage_.bias[smaller(j + lane / kRows, count - 1) * kWidth + lane % kRows];
    }
    return L::load(bias);
  }

  // Logits of the tile, hidden ones -inf, and their maxima by lane. Every row sees the first `open`
  // keys.
  Vec finish_scores(Real* scores, Interval keys, int64 open) const {
    const int64 count = keys.end - keys.begin;
    const bool plain = is_plain(terms_.on);
    const Vec lowest = L::set(-Real(__builtin_huge_val()));
    Vec max = lowest;
    for (int64 j = 0; j < count; j += kKeys) {
      Vec s = L::load(scores + j * kRows);
      if (!plain) s = terms_.value(s, bias_of(j, count), 0, keys.begin + j);
      if (j + kKeys > open) s = L::select(lanes_of(stage_.visible, j, open, count), s, lowest);
      if (!plain || j + kKeys > open) L::store(scores + j * kRows, s);
      max = L::max(max, s);
    }
    return max;
  }

  // The largest of each row's lanes, in all of them.
  static Vec row_max(Vec max) {
    Real lane[L::kLanes];
    L::store(lane, max);
    for (int half = L::kLanes / 2; half >= kRows; half /= 2) {
      for (int l = 0; l < half; ++l) lane[l] = larger(lane[l], lane[l + half]);
    }
    for (int l = kRows; l < L::kLanes; ++l) lane[l] = lane[l % kRows];
    return L::load(lane);
  }

  const HeadContext& context_;
  const Stage<Real>& stage_;
  const ScoreTerms<L> terms_;
  const Vec exponent_, slack_;
  SoftmaxRow<L> row_;  // maxima of the lane's row; sums of the lane alone
  Vec tile_sum_ = L::set(0);
};

}  // namespace
}  // namespace regard
