// Backward: P and dS of a panel, from its scores and dP, in steps that fit between the products of
// tile registers.
//   P^T = e^(S^T - lse)     dS^T = P^T (Z dP^T - delta)
#pragma once

#include "cpu/kernels/exponentials.hpp"
#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"

namespace regard {
namespace {

// Of a panel's rows with one key.
template <class L>
struct KeyGradients {
  typename L::Vec weight[L::kVectors];
  typename L::Vec dscore[L::kVectors];
};

// Whether logits are scores times their unit, no pair is hidden, and dropout keeps all.
inline bool has_plain_gradients(const Features& on, bool may_hide) {
  return is_plain(on) && !on.dropout && !may_hide;
}

// Where that is so.
template <class L>
class PlainGradients : CopiedByMember {
  using Real = typename L::Real;
  using Vec = typename L::Vec;

 public:
  // lse, delta: [panel]. scores, dweights: [keys][panel].
  PlainGradients(Real unit, const Real* lse, const Real* delta, const Real* scores,
                 const Real* dweights)
      : scores_(scores),
        to_dweights_(dweights - scores),
        unit_(L::set(unit)),
        log2e_(L::set(Real(kLog2E))) {
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      minus_lse_[v] = L::sub(L::set(0), L::load(lse + v * L::kLanes));
      delta_[v] = L::load(delta + v * L::kLanes);
    }
  }

  // Of the tile's key j.
  REGARD_INLINE void of(int64 j, KeyGradients<L>& to) const {
    const Real* key = scores_ + j * L::kVectors * L::kLanes;
    asm("" : "+r"(key));  // else GCC multiplies j for each vector
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      const Real* const pair = key + v * L::kLanes;
      to.weight[v] = weight(L::load(pair), v);
      to.dscore[v] = dscore(to.weight[v], L::load(pair + to_dweights_), v);
    }
  }

  REGARD_INLINE Vec weight(Vec logit, int v) const {
    return made_.exp2(L::mul(L::fma(logit, unit_, minus_lse_[v]), log2e_));
  }
  REGARD_INLINE Vec dscore(Vec weight, Vec dweight, int v) const {
    return L::mul(weight, L::sub(dweight, delta_[v]));
  }

 private:
  const Real* scores_;
  int64 to_dweights_;  // from the scores
  Vec unit_, log2e_, minus_lse_[L::kVectors], delta_[L::kVectors];
  [[no_unique_address]] WeightsOf<L> made_;
};

// In all other cases.
template <class L>
struct ScoreGradients {
  using Real = typename L::Real;
  using Vec = typename L::Vec;

  const PlainGradients<L>& plain;
  const ScoreTerms<L>& terms;
  const Stage<Real>& stage;
  Real* scores;  // dS in f32 takes their place, if it is kept
  const Real* dweights;
  int64 first_key;  // of the sequence
  bool may_hide, keeps_dscores;

  // Of the tile's key j.
  REGARD_INLINE void of(int64 j, KeyGradients<L>& to) const {
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) of_vector(j, v, to.weight[v], to.dscore[v]);
  }

 private:
  REGARD_INLINE void of_vector(int64 j, int v, Vec& weight, Vec& dscore) const {
    const Features& on = terms.on;
    const Vec zero = L::set(0), keep = L::set(terms.keep_scale);
    const int64 pair = (j * L::kVectors + v) * L::kLanes;
    const auto seen = [&](Vec x) {
      return may_hide ? L::select(L::mask_of(stage.visible[j] >> (v * L::kLanes)), x, zero) : x;
    };
    const Vec raw = L::load(scores + pair);
    Vec dweight = L::load(dweights + pair), logit = raw;
    if (!is_plain(on)) {
      logit = terms.value(raw, on.bias ? L::load(stage.bias + pair) : zero, v, first_key + j);
    }
    const Vec whole = plain.weight(logit, v);
    weight = whole;
    if (on.dropout) {
      const auto kept = L::mask_of(stage.kept[j] >> (v * L::kLanes));
      dweight = L::select(kept, L::mul(dweight, keep), zero);
      weight = L::mul(whole, L::select(kept, keep, zero));
    }
    weight = seen(weight);
    dscore = seen(plain.dscore(whole, dweight, v));
    if (keeps_dscores) L::store(scores + pair, dscore);
    if (has_slope(on)) {
      dscore = seen(L::mul(dscore, score_slope<L>(on, terms.params, raw)));
    }
  }
};

// Where P and dS of a panel's next key are stored, and, where Units are pairs, which are those of
// queries, dS once more as pairs of keys. Terms after the first lie `term` and `pair_term` Units
// on.
template <class L>
struct GradientRows {
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;
  static constexpr int kStep = L::kPack;  // keys

  Unit* weights;
  int64 to_dscores;  // from the weights
  int64 row, width;  // of their matrices
  int64 term;
  Unit* pairs;  // only where pack is 2
  int64 pair_term;
  [[no_unique_address]] CopiedByMember by_member{};

  // The next keys of a tile of `keys`, which are those from j on.
  template <class Gradients>
  REGARD_INLINE void store(int64 j, int64 keys, const Gradients& gradients) {
    KeyGradients<L> key[kStep];
    store_one(j, gradients, key[0]);
    if constexpr (L::kPack == 2) {
      if (j + 1 < keys) {
        store_one(j + 1, gradients, key[1]);
      } else {
        key[1] = {};
      }
      store_pair(key[0], key[1]);
    }
  }
  template <class Gradients>
  REGARD_INLINE void store_one(int64 j, const Gradients& gradients, KeyGradients<L>& key) {
    gradients.of(j, key);
    store_key(key);
    go_on();
  }
  REGARD_INLINE void store_pair(const KeyGradients<L>& even, const KeyGradients<L>& odd) {
    each_term<L>([&]<class Term>(int n) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v) {
        Term::store_weights(pairs + n * pair_term + v * L::kLanes, even.dscore[v], odd.dscore[v]);
      }
    });
    pairs += kWidth;
  }

  // After the last of `keys`.
  void finish(int64 keys) const {
    if constexpr (L::kPack == 2) {
      Unit* const first = pairs - divide_up(keys, L::kPack) * kWidth;
      for (int n = 0; n < kTerms<L>; ++n) {
        for (int v = 0; v < L::kVectors; ++v) {
          clear_last_tile<L>(first + n * pair_term + v * L::kLanes, kWidth, keys);
        }
      }
    }
  }

 private:
  REGARD_INLINE void store_key(const KeyGradients<L>& key) const {
    if constexpr (L::kPack == 2) {
      each_term<L>([&]<class Term>(int n) __attribute__((always_inline)) {
        Unit* const to = weights + n * term;
        Term::store_rounded_row(to, key.weight[0], key.weight[1]);
        Term::store_rounded_row(to + to_dscores, key.dscore[0], key.dscore[1]);
      });
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v) {
        L::store(weights + v * L::kLanes, key.weight[v]);
        L::store(weights + to_dscores + v * L::kLanes, key.dscore[v]);
      }
    }
  }

  // To the next row, as vector_at has them.
  REGARD_INLINE void go_on() {
    int64 step = width;
    if constexpr (kHasTiles<L>) {
      constexpr int64 kSide = L::kLanes;
      ++row;
      step = kSide + (row % kSide == 0 ? kSide * (width - kSide) : 0);
    }
    weights += step;
  }
};

// The plain gradients of a tile, next to products of tiles: those of a key are a part of a pace.
template <class L>
class GradientSteps : CopiedByMember {
 public:
  // `products`: how many are expected.
  GradientSteps(const PlainGradients<L>& gradients, const GradientRows<L>& rows, int64 keys,
                int64 products)
      : gradients_(gradients), rows_(rows), keys_(keys), pace_(keys, products) {}

  // What goes with one product.
  REGARD_INLINE void before() {
    if (pace_.is_two() && next_ + 1 < keys_) store_even();
  }
  REGARD_INLINE void step() {
    if (next_ + 1 >= keys_) return;
    if (pace_.is_two()) {
      store_odd();
    } else if (pace_.is_due()) {
      has_even_ ? store_odd() : store_even();
    }
  }

  // Whatever is left.
  void finish() const {
    GradientSteps rest = *this;
    if constexpr (L::kPack == 2) {
      if (rest.has_even_) rest.store_odd();
    }
    for (; rest.next_ < keys_; rest.next_ += GradientRows<L>::kStep) {
      rest.rows_.store(rest.next_, keys_, rest.gradients_);
    }
    rest.rows_.finish(keys_);
  }

 private:
  REGARD_INLINE void store_even() {
    rows_.store_one(next_, gradients_, even_);
    has_even_ = true;
  }
  REGARD_INLINE void store_odd() {
    KeyGradients<L> odd;
    rows_.store_one(next_ + 1, gradients_, odd);
    rows_.store_pair(even_, odd);
    has_even_ = false;
    next_ += 2;
  }

  PlainGradients<L> gradients_;
  GradientRows<L> rows_;
  int64 keys_, next_ = 0;
  Pace pace_;
  KeyGradients<L> even_{};  // of key next_
  bool has_even_ = false;
};

}  // namespace
}  // namespace regard
