// The weights of a score tile, P^T = 2^((S^T - max) exponent), and their sums, in steps that fit
// between the products of tile registers.
#pragma once

#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

// The scores of a panel and some keys, and what turns them into weights.
template <class L>
struct ScoreTile {
  typename L::Real* scores;  // [keys][panel]
  int64 keys;
  int vectors;
  typename L::Real exponent;    // of the unit of scores, in powers of two
  const typename L::Real* max;  // [panel]
  typename L::Real* sum;        // [panel]: the sums of the weights are added
  const uint64* kept;           // by key: bits of the lanes that dropout keeps; null: all
};

// Weights take the place of the scores: row u of [units][terms][panel] lies where rows up to 2 u +
// 1 of [keys][panel] were, which have been read by then.
template <class L>
class Exponentials {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;
  static_assert(kTerms<L> <= L::kPack);

 public:
  // `products`: how many of tiles are expected next to these exponentials.
  Exponentials(const ScoreTile<L>& tile, int64 products)
      : scores_(tile.scores),
        weights_(reinterpret_cast<Unit*>(tile.scores)),
        kept_(tile.kept),
        left_(tile.keys / L::kPack),
        vectors_(tile.vectors),
        exponent_(L::set(tile.exponent)) {
    const int64 each = left_ > 0 ? products / left_ : 0;
    pause_ = each >= 4 ? 3 : each >= 2 ? 1 : 0;
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      base_[v] = subtractable<L>(L::load(tile.max + v * L::kLanes));
      sum_[v] = L::set(0);
    }
  }

  // The share of one product.
  REGARD_INLINE void step() {
    if (left_ > 0 && (++turn_ & pause_) == 0) weigh_unit<L::kPack>();
  }

  // Whatever is left of the tile.
  void finish(const ScoreTile<L>& tile) {
    Exponentials rest = *this;
    while (rest.left_ > 0) rest.template weigh_unit<L::kPack>();
    if (tile.keys % L::kPack != 0) rest.template weigh_unit<1>();
    for (int v = 0; v < tile.vectors; ++v) {
      for (int term = 0; term < kTerms<L>; ++term) {
        clear_last_tile<L>(reinterpret_cast<Unit*>(tile.scores) + term * kWidth + v * L::kLanes,
                           kTerms<L> * kWidth, tile.keys);
      }
      Real* const sum = tile.sum + v * L::kLanes;
      L::store(sum, L::add(L::load(sum), rest.sum_[v]));
    }
  }

 private:
  // The next Unit of each query: `kKeys` keys, and zeros in place of others.
  template <int kKeys>
  REGARD_INLINE void weigh_unit() {
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      if (v >= vectors_) break;
      const Vec first = weight(0, v);
      if constexpr (L::kPack == 1) {
        sum_[v] = L::add(sum_[v], first);
        L::store(weights_ + v * L::kLanes, kept(0, v, first));
      } else {
        const Vec second = kKeys > 1 ? weight(1, v) : L::set(0);
        sum_[v] = L::add(sum_[v], kKeys > 1 ? L::add(first, second) : first);
        L::store_weights(weights_ + v * L::kLanes, kept(0, v, first),
                         kKeys > 1 ? kept(1, v, second) : second);
      }
    }
    scores_ += L::kPack * kWidth;
    weights_ += kTerms<L> * kWidth;
    if (kept_) kept_ += L::kPack;
    --left_;
  }
  REGARD_INLINE Vec weight(int key, int v) const {
    const Vec score = L::load(scores_ + key * kWidth + v * L::kLanes);
    return weight_of<L>(score, base_[v], exponent_);
  }
  REGARD_INLINE Vec kept(int key, int v, Vec weight) const {
    if (!kept_) return weight;
    return L::select(L::mask_of(kept_[key] >> (v * L::kLanes)), weight, L::set(0));
  }

  const Real* scores_;
  Unit* weights_;
  const uint64* kept_;
  int64 left_;  // whole Units
  int vectors_;
  uint32 turn_ = 0, pause_ = 0;  // a share in every 1, 2 or 4 products
  Vec exponent_;
  Vec base_[L::kVectors];
  Vec sum_[L::kVectors];
};

}  // namespace
}  // namespace regard
