// dQ of a block of rows: a panel's product of dS and the chunk's keys, and the sum over the chunks
// of keys, in their order.
#pragma once

#include "cpu/kernels/dq_order.hpp"
#include "cpu/kernels/gradient_tiles.hpp"
#include "cpu/kernels/multiply.hpp"

namespace regard {
namespace {

template <class L>
struct QueryGradients : GradientTiles<L> {
  using Tiles = GradientTiles<L>;
  using Tiles::kWidth, Tiles::p, Tiles::tiling, Tiles::context, Tiles::dims, Tiles::at;
  using Tiles::panels, Tiles::reals_at, Tiles::units_at, Tiles::wide;
  using typename Tiles::Real, typename Tiles::Unit;

  const BackwardShared shared;

  QueryGradients(const Problem& problem, const CpuTiling& cpu_tiling,
                 const BackwardShared& shared_arrays, const BackwardTask& task, char* memory)
      : Tiles(problem, cpu_tiling, task, memory), shared(shared_arrays) {}

  SharedDeltas<Real> shared_deltas(int64 block) const {
    if (!shared.deltas) return {nullptr, nullptr};
    return {static_cast<Real*>(shared.deltas) + block * tiling.block_q,
            shared.delta_states + block};
  }

  // Query rows and vectors of a panel that products take: those in use, except by whole tiles.
  int64 rows_in_products(int index) const { return kHasTiles<L> ? kWidth : panels[index].rows; }
  int vectors_in_products(int index) const {
    return int(divide_up(rows_in_products(index), L::kLanes));
  }

  // ------------------------------------------------------------------------ a panel's product

  // A panel's dS in pairs from a key of the chunk on; without tile registers, of the block's keys.
  Unit* dscore_pairs(int index, int64 chunk_row) const {
    Unit* const pairs = units_at(at.dscore_pairs);
    if constexpr (!kHasTiles<L>) return pairs;
    return pairs + index * kTerms<L> * this->dscore_pair_term() + chunk_row / L::kPack * kWidth;
  }

  // Tile registers load and store sums slowly, so that a panel's dQ is one product of the keys of
  // the chunk that it sees, as long as they follow each other.
  void keep_dscores(int index, Interval keys, int64 chunk_begin) const {
    Interval& kept = panels[index].dscore_keys;
    if (!kept.empty() && kept.end < keys.begin) multiply_kept_dscores(index, chunk_begin);
    kept = hull(kept, keys);
  }
  void multiply_kept_dscores(int index, int64 chunk_begin) const {
    GradientPanel<L>& panel = panels[index];
    const Interval kept = panel.dscore_keys;
    if (kept.empty()) return;
    const int64 from = kept.begin - chunk_begin, size = kept.end - kept.begin;
    const Unit* const dscores = dscore_pairs(index, from);
    if (panel.has_dq) {
      multiply_dscores<Result::add>(index, dscores, kWidth, from, size);
    } else {
      multiply_dscores<Result::replace>(index, dscores, kWidth, from, size);
    }
    panel.has_dq = true;
    panel.dscore_keys = {};
  }

  void clear_dq(int first, int count) const {
    Real* const dq = reals_at(at.dq) + first * wide * kWidth;
    for (int64 i = 0; i < count * wide * kWidth; i += L::kLanes) L::store(dq + i, L::set(0));
  }

  // A panel's dQ of `size` keys of the chunk, whose dS are rows `stride` Units apart. The rows of
  // the first vector do not see the last ones, `late` Units.
  template <Result result>
  void multiply_dscores(int index, const Unit* dscores, int64 stride, int64 from, int64 size,
                        int64 late = 0) const {
    const Product<L> product{.a = this->key_pairs().from(from),
                             .lda = this->key_pairs().stride,
                             .b = dscores,
                             .ldb = stride,
                             .c = reals_at(at.dq) + index * wide * kWidth,
                             .ldc = kWidth,
                             .m = dims.dim,
                             .k = units(tiling.shape, size),
                             .late = late,
                             .a_in_tiles = AcrossRows<L>::kInTiles,
                             .a_term = this->key_pair_term(),
                             .b_term = this->dscore_pair_term(),
                             .skipped_pairs = kTerms<L> - 1};
    multiply_wide<L, AcrossRows<L>::kWalk, result>(product, vectors_in_products(index));
  }

  // ------------------------------------------------------------------- the sum over the chunks

  // Adds this chunk's dQ of a block to the shared sum, after the chunks before it that visit the
  // block. `next` visits it after this one; if that is kNone, this one writes the result.
  void share_dq(int count, int64 block, int64 chunk, bool is_first, int64 next,
                uint8* nonfinite) const {
    const int64 panel_size = wide * kWidth;
    Real* const sum =
        static_cast<Real*>(shared.dq) + block * (tiling.block_q / kWidth) * panel_size;
    Real* const own = reals_at(at.dq);
    Real* const to = next != kNone ? sum : own;
    if (!is_first) {
      wait_for_chunk(shared.next_chunk + block, int32(chunk));
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(to + i, L::add(L::load(sum + i), L::load(own + i)));
      }
    } else if (to == sum) {
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(sum + i, L::load(own + i));
      }
    }
    if (next != kNone) {
      release_chunk(shared.next_chunk + block, int32(next));
    } else {
      write_dq(count, nonfinite);
    }
  }

  void write_dq(int count, uint8* nonfinite) const {
    Real factor[kWidth], held[kWidth];
    for (Real& x : factor) x = Real(p.score.scale);
    for (Real& x : held) x = 1;
    const auto ahead = [&](const Panel& panel) __attribute__((always_inline)) {
      prefetch_panel<3, true>(context, panel, p.dq, dims.dim);
    };
    each_panel_ahead<L>(panels, 0, count, ahead, [&](int i) {
      const Real* const sums = reals_at(at.dq) + i * wide * kWidth;
      const uint64 bad = nonfinite ? nonfinite_lanes<L>(sums, panels[i], dims.dim) : 0;
      store_lanes<L>(sums, factor, context, panels[i], p.dq, dims.dim,
                     p.accumulate ? held : nullptr, bad);
      for (int lane = 0; nonfinite && lane < panels[i].rows; ++lane) {
        nonfinite[panels[i].first + lane] = bad >> lane & 1;
      }
    });
  }
};

}  // namespace
}  // namespace regard
