// The weights of a score tile, P^T = 2^((S^T - max) exponent), and their sums, in steps that fit
// between the products of tile registers.
#pragma once

#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/packing.hpp"
#include "semantics/softmax.h"

namespace regard {
namespace {

// The scores of a panel and some keys, and what turns them into weights.
template <class L>
struct ScoreTile {
  typename L::Real* scores;  // [keys][panel]
  int64 keys;
  int vectors;
  typename L::Real exponent;    // of the unit of scores, in powers of two
  typename L::Real most;        // of a row's sum of weights, if they are to count
  const typename L::Real* max;  // [panel]
  typename L::Real* sum;        // [panel]: the sums of the weights are added
  const uint64* kept;           // by key: bits of the lanes that dropout keeps; null: all
};

// 2^x, and how weights are stored as Units.
template <class L>
struct WeightsOf {
  static typename L::Vec exp2(typename L::Vec x) { return L::exp2(x); }
  static void store(typename L::Unit* to, typename L::Vec even, typename L::Vec odd) {
    L::store_weights(to, even, odd);
  }
};
template <class L>
  requires requires { typename L::Weights; }
struct WeightsOf<L> : L::Weights {};

// Weights take the place of the scores: row u of [units][terms][panel] lies where rows up to 2 u +
// 1 of [keys][panel] were, which have been read by then. kVectors: the tile's, which are parts of a
// pace.
template <class L, int kVectors>
class Exponentials : CopiedByMember {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;
  static constexpr bool kFused = kHasTiles<L>;
  static_assert(kTerms<L> <= L::kPack);

 public:
  // `products`: how many of tiles are expected next to these exponentials.
  Exponentials(const ScoreTile<L>& tile, int64 products)
      : scores_(tile.scores),
        weights_(reinterpret_cast<Unit*>(tile.scores)),
        left_(tile.keys / L::kPack),
        pace_(left_ * kVectors, products),
        exponent_(L::set(tile.exponent)) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      base_[v] = subtractable<L>(L::load(tile.max + v * L::kLanes));
      if constexpr (kFused) base_[v] = fused_base(tile, v, base_[v]);
      sum_[v] = L::set(0);
    }
  }

  // What goes with one product.
  REGARD_INLINE void before() {
    if (kVectors > 1 && pace_.is_two() && left_ > 0) weigh_vector<L::kPack>(nullptr, 0);
  }
  REGARD_INLINE void step() {
    static_assert(kVectors <= 2);
    if (left_ <= 0) return;
    if (pace_.is_two()) {
      weigh_vector<L::kPack>(nullptr, kVectors - 1);
      next_unit();
    } else if (pace_.is_due()) {
      weigh_next();
    }
  }

  // Whatever is left of the tile. False if the sum of some row is above the most, or NaN: then
  // nothing is added to `tile.sum`.
  bool finish(const ScoreTile<L>& tile) {
    Exponentials rest = *this;
    if constexpr (kFused) {
      if (rest.has_begun_unit_) rest.weigh_next();
    }
    const uint64* kept = tile.kept ? tile.kept + (rest.scores_ - tile.scores) / kWidth : nullptr;
    for (; rest.left_ > 0; kept = kept ? kept + L::kPack : nullptr) {
      rest.template weigh_unit<L::kPack>(kept);
    }
    if (tile.keys % L::kPack != 0) rest.template weigh_unit<1>(kept);
    if (tile.most < Real(__builtin_huge_val()) && !rest.sums_are_below(tile.most)) return false;
    for (int v = 0; v < kVectors; ++v) {
      for (int term = 0; term < kTerms<L>; ++term) {
        clear_last_tile<L>(reinterpret_cast<Unit*>(tile.scores) + term * kWidth + v * L::kLanes,
                           kTerms<L> * kWidth, tile.keys);
      }
      Real* const sum = tile.sum + v * L::kLanes;
      L::store(sum, L::add(L::load(sum), rest.sum_[v]));
    }
    return true;
  }

 private:
  bool sums_are_below(Real most) const {
    uint64 below = ~uint64(0);
    for (int v = 0; v < kVectors; ++v) below &= L::bits_of(L::less(sum_[v], L::set(most)));
    return (below & ((uint64(1) << L::kLanes) - 1)) == (uint64(1) << L::kLanes) - 1;
  }

  // What an FMA adds to a score times the exponent. Its rounding is a factor of all weights that a
  // row has under one maximum, of 2e-5 from 1 at most; where the base is larger, it is subtracted
  // from the scores beforehand.
  static Vec fused_base(const ScoreTile<L>& tile, int v, Vec base) {
    const Vec zero = L::set(0), product = L::mul(base, L::set(tile.exponent));
    const uint64 small = L::bits_of(L::less(L::abs(product), L::set(1024)));
    if (small == (uint64(1) << L::kLanes) - 1) return L::sub(zero, product);
    for (int64 j = 0; j < tile.keys; ++j) {
      Real* const row = tile.scores + j * kWidth + v * L::kLanes;
      L::store(row, L::sub(L::load(row), base));
    }
    return zero;
  }

  // The next Unit of each query: `kKeys` keys, and zeros in place of others. `kept` as the tile's,
  // from these keys on.
  template <int kKeys>
  REGARD_INLINE void weigh_unit(const uint64* kept) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weigh_vector<kKeys>(kept, v);
    next_unit();
  }
  // One vector of it.
  template <int kKeys>
  REGARD_INLINE void weigh_vector(const uint64* kept, int v) {
    const Vec first = weight(0, v);
    if constexpr (L::kPack == 1) {
      sum_[v] = L::add(sum_[v], first);
      L::store(weights_ + v * L::kLanes, masked(kept, 0, v, first));
    } else {
      const Vec second = kKeys > 1 ? weight(1, v) : L::set(0);
      sum_[v] = L::add(sum_[v], kKeys > 1 ? L::add(first, second) : first);
      made_.store(weights_ + v * L::kLanes, masked(kept, 0, v, first),
                  kKeys > 1 ? masked(kept, 1, v, second) : second);
    }
  }
  REGARD_INLINE void weigh_next() {
    if (kVectors > 1 && !has_begun_unit_) {
      weigh_vector<L::kPack>(nullptr, 0);
      has_begun_unit_ = true;
    } else {
      weigh_vector<L::kPack>(nullptr, kVectors - 1);
      has_begun_unit_ = false;
      next_unit();
    }
  }
  REGARD_INLINE void next_unit() {
    scores_ += L::kPack * kWidth;
    weights_ += kTerms<L> * kWidth;
    --left_;
  }
  REGARD_INLINE Vec weight(int key, int v) const {
    const Vec score = L::load(scores_ + key * kWidth + v * L::kLanes);
    if constexpr (kFused) return made_.exp2(L::fma(score, exponent_, base_[v]));
    return weight_of<L>(score, base_[v], exponent_);
  }
  REGARD_INLINE static Vec masked(const uint64* kept, int key, int v, Vec weight) {
    if (!kept) return weight;
    return L::select(L::mask_of(kept[key] >> (v * L::kLanes)), weight, L::set(0));
  }

  const Real* scores_;
  Unit* weights_;
  int64 left_;  // whole Units
  Pace pace_;
  bool has_begun_unit_ = false;  // its first vector is made
  Vec exponent_;
  Vec base_[kVectors];
  Vec sum_[kVectors];
  [[no_unique_address]] WeightsOf<L> made_;
};

// Calls use(exponentials of the tile).
template <class L, int kVectors = L::kVectors, class Use>
void with_exponentials(const ScoreTile<L>& tile, int64 products, const Use& use) {
  if constexpr (kVectors > 1) {
    if (tile.vectors < kVectors) return with_exponentials<L, kVectors - 1>(tile, products, use);
  }
  use(Exponentials<L, kVectors>(tile, products));
}

}  // namespace
}  // namespace regard
