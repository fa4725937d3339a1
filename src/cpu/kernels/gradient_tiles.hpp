// The scratch memory of a backward task: a chunk of keys with the sums of their gradients, and the
// current block of query rows.
#pragma once

#include "cpu/kernels/packing.hpp"
#include "cpu/kernels/shared_deltas.hpp"
#include "cpu/kernels/strips.hpp"
#include "cpu/kernels/transposed.hpp"

namespace regard {
namespace {

// A panel, and lse and delta of its rows.
template <class L>
struct GradientPanel : Panel {
  typename L::Real lse[kMaxPanel];    // +inf in lanes that are not in use or saw nothing: P = 0
  typename L::Real delta[kMaxPanel];  // dout . out - dlse
  // Only with tiles: keys whose dS is kept for a product, and whether dq has that of others.
  Interval dscore_keys;
  bool has_dq = false;
};

template <class L>
struct GradientTiles {
  static_assert(sizeof(GradientPanel<L>) <= kPanelBytes);
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;

  const Problem& p;
  const CpuTiling& tiling;
  const HeadContext context;
  const HeadSizes dims;
  const BackwardScratch at;
  char* const scratch;
  GradientPanel<L>* const panels;
  const int64 wide, wide_v;           // padded head sizes
  const RowsOfUnits<L> keys, values;  // of the chunk

  GradientTiles(const Problem& problem, const CpuTiling& cpu_tiling, const BackwardTask& task,
                char* memory)
      : p(problem),
        tiling(cpu_tiling),
        context{problem, task.b, task.kv, sequence(problem.sequences, task.b)},
        dims{p.sizes.dim, p.sizes.dim_v},
        at(backward_scratch(tiling, dims)),
        scratch(memory),
        panels(reinterpret_cast<GradientPanel<L>*>(scratch + at.panels)),
        wide(padded(tiling.shape, dims.dim)),
        wide_v(padded(tiling.shape, dims.dim_v)),
        keys(rows_of_chunk(p.k, dims.dim, at.keys, task.chunk)),
        values(rows_of_chunk(p.v, dims.dim_v, at.values, task.chunk)) {}

  Unit* units_at(int64 offset) const { return reinterpret_cast<Unit*>(scratch + offset); }
  Real* reals_at(int64 offset) const { return reinterpret_cast<Real*>(scratch + offset); }
  int64 row_units(int64 dim) const { return padded_units(tiling.shape, dim); }
  AcrossRows<L> key_pairs() const {
    if constexpr (L::kPack == 1) return {keys.at, keys.stride};
    return {units_at(at.key_pairs), tiling.shape, dims.dim, tiling.chunk_k};
  }
  int64 block_units(int count) const { return int64(count) * kWidth / L::kPack; }

  // Units from a term of an array to the next.
  int64 lane_term(int64 dim) const { return row_units(dim) * kWidth; }
  int64 row_term(int64 dim) const { return tiling.chunk_k * row_units(dim); }
  int64 key_pair_term() const { return units(tiling.shape, tiling.chunk_k) * wide; }
  int64 row_pair_term(int64 width) const { return units(tiling.shape, tiling.block_q) * width; }
  int64 tile_term() const { return tiling.block_k * units(tiling.shape, tiling.block_q); }
  int64 dscore_pair_term() const {
    return units(tiling.shape, kHasTiles<L> ? tiling.chunk_k : tiling.block_k) * kWidth;
  }

  // The panel's rows, transposed.
  Unit* lanes_at(int64 offset, int64 dim, int panel) const {
    return units_at(offset) + panel * kTerms<L> * lane_term(dim);
  }

  // ------------------------------------------------------------------------ the block of rows

  // Rows' values of lse, delta or dlse. `to`: [panel], and as much memory as a vector behind it.
  void load_values(Real* to, const View& view, const Panel& panel) const {
    const int64 width = view.strides.row == 1 ? L::kLanes : 1;
    each_head(panel, [&](int64, int first, int end) {
      for (int lane = first; lane < end; lane += int(width)) {
        L::store(to + lane, L::load_as(view.type, view.data, context.offset_q(view, panel, lane),
                                       smaller<int64>(width, end - lane)));
      }
    });
  }

  // dout . out of a row, a part in each lane. A row that sees nothing has out = 0 and takes nothing
  // from dout.
  Vec parts_of_delta(const Panel& panel, int lane) const {
    const int64 out = context.offset_q(p.out, panel, lane);
    const int64 dout = context.offset_q(p.dout, panel, lane);
    const Vec zero = L::set(0);
    Vec sum = zero;
    const auto add = [&](Vec x, Vec y) {
      sum = L::add(sum, L::select(L::equal(x, zero), zero, L::mul(x, y)));
    };
    int64 d = 0;
    if (p.out.type == p.dout.type) {
      with_strips<L>(p.out, dims.dim_v, [&]<class S>(S) {
        if (!S::fits(p.out, dims.dim_v)) return;  // a type that these lanes have no strips of
        const auto* const x_row = static_cast<const char*>(p.out.data) + out * S::kSize;
        const auto* const y_row = static_cast<const char*>(p.dout.data) + dout * S::kSize;
        for (; d + S::kElements <= dims.dim_v; d += S::kElements) {
          Vec x[S::kVectors], y[S::kVectors];
          S::load(x_row + d * S::kSize, x);
          S::load(y_row + d * S::kSize, y);
          for (int v = 0; v < S::kVectors; ++v) add(x[v], y[v]);
        }
      });
    }
    for (; d < dims.dim_v; d += L::kLanes) {
      add(L::load_as(p.out.type, p.out.data, out + d, dims.dim_v - d),
          L::load_as(p.dout.type, p.dout.data, dout + d, dims.dim_v - d));
    }
    return sum;
  }

  // dout . out - dlse of each row.
  void load_deltas(Real* to, const Panel& panel) const {
    if (p.delta.given()) return load_values(to, p.delta, panel);
    Real dlse[kMaxPanel + L::kLanes] = {};
    if (p.dlse.given()) load_values(dlse, p.dlse, panel);
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      const int first = v * L::kLanes, rows = smaller(L::kLanes, panel.rows - first);
      Vec parts[L::kLanes];
      for (int t = 0; t < L::kLanes; ++t) {
        parts[t] = t < rows ? parts_of_delta(panel, first + t) : L::set(0);
      }
      L::transpose(parts);
      Vec delta = parts[0];
      for (int t = 1; t < L::kLanes; ++t) delta = L::add(delta, parts[t]);
      L::store(to + first, L::sub(delta, L::load(dlse + first)));
    }
  }

  // A panel's, from the other tasks or for them.
  void share_deltas(Real* to, const SharedDeltas<Real>& deltas, int index) const {
    const int64 first = index * kWidth, count = vectors_of<L>(panels[index]) * L::kLanes;
    if (deltas.are_ready()) return deltas.load(to, first, count);
    load_deltas(to, panels[index]);
    if (deltas.are_wanted()) deltas.store(to, first, count);
  }

  void load_terms(GradientPanel<L>& panel, const Real* delta) const {
    constexpr Real kInfinity = Real(__builtin_huge_val());
    Real lse[kMaxPanel + L::kLanes];
    load_values(lse, p.lse, panel);
    for (int lane = 0; lane < kWidth; ++lane) {
      const bool sees = lane < panel.rows && lse[lane] != -kInfinity;
      panel.lse[lane] = sees ? lse[lane] : kInfinity;
      panel.delta[lane] = lane < panel.rows ? delta[lane] : 0;
    }
  }

  // All chunks read all rows: when one comes to a block, other rows were read since the one before.
  [[gnu::always_inline]] void prefetch(const Panel& panel, bool with_out) const {
    prefetch_panel<2>(context, panel, p.q, dims.dim);
    prefetch_panel<2>(context, panel, p.dout, dims.dim_v);
    if (with_out) prefetch_panel<2>(context, panel, p.out, dims.dim_v);
  }

  // The block's rows as B of the products for dK and dV: as they lie, if they are those of one head
  // and whole vectors; else where they are packed.
  RowsOfUnits<L> rows_of_block(const View& view, int64 dim, int64 memory, int count) const {
    const Panel& last = panels[count - 1];
    if (L::kPack == 1 && dim % L::kLanes == 0 && last.head[last.rows - 1] == panels[0].head[0]) {
      const auto in_place = rows_in_place<L>(view, dim, context.offset_q(view, panels[0], 0));
      if (in_place.at) return in_place;
    }
    return {units_at(memory), padded(tiling.shape, dim)};
  }
  RowsOfUnits<L> query_rows(int count) const {
    return rows_of_block(p.q, dims.dim, at.query_pairs, count);
  }
  RowsOfUnits<L> dout_rows(int count) const {
    return rows_of_block(p.dout, dims.dim_v, at.dout_pairs, count);
  }

  // The panels that see some of the chunk's keys.
  void load_block(int count, Interval keys, const SharedDeltas<Real>& deltas) const {
    const bool packs_queries = p.dk.given() && query_rows(count).at == units_at(at.query_pairs);
    const bool packs_douts = p.dv.given() && dout_rows(count).at == units_at(at.dout_pairs);
    const auto ahead = [&](const Panel& panel) __attribute__((always_inline)) {
      prefetch(panel, !p.delta.given() && !deltas.are_ready());
    };
    each_panel_ahead<L>(panels, 0, count, ahead, [&](int i) {
      GradientPanel<L>& panel = panels[i];
      const bool sees_keys = !panel.seen.within(keys).empty();
      Real delta[kMaxPanel + L::kLanes];
      if (sees_keys || deltas.are_wanted()) share_deltas(delta, deltas, i);
      if (!sees_keys) return;
      load_terms(panel, delta);
      const auto offset_of_lane = [&](const View& view) {
        return [&](int64 lane) {
          return lane < panel.rows ? context.offset_q(view, panel, int(lane)) : kNoRow;
        };
      };
      each_term<L>([&]<class Term>(int n) {
        const auto lanes = [&](int64 to, const View& view, int64 dim) {
          pack_lanes<Term>(lanes_at(to, dim, i) + n * lane_term(dim), context, panel, view, dim);
        };
        const auto pairs = [&](int64 to, int64 width, const View& view, int64 dim) {
          pack_pairs<Term>(units_at(to) + n * row_pair_term(width) + block_units(i) * width, width,
                           view, dim, kWidth, offset_of_lane(view));
        };
        lanes(at.queries, p.q, dims.dim);
        lanes(at.douts, p.dout, dims.dim_v);
        if (packs_queries) pairs(at.query_pairs, wide, p.q, dims.dim);
        if (packs_douts) pairs(at.dout_pairs, wide_v, p.dout, dims.dim_v);
      });
    });
    deltas.publish();
  }

  // ---------------------------------------------------------------------------- the chunk of keys

  Interval chunk_keys(int64 chunk) const {
    return KeyChunks(tiling, context.seq.len_k).keys(chunk);
  }

  RowsOfUnits<L> rows_of_chunk(const View& view, int64 dim, int64 memory, int64 chunk) const {
    const int64 first = context.offset_k(view, chunk_keys(chunk).begin);
    const auto in_place = rows_in_place<L>(view, dim, first);
    return in_place.at ? in_place : RowsOfUnits<L>{units_at(memory), row_units(dim)};
  }

  void load_chunk(Interval chunk) const {
    const int64 size = chunk.end - chunk.begin;
    each_term<L>([&]<class Term>(int n) {
      const auto pack = [&](const RowsOfUnits<L>& rows, int64 to, const View& view, int64 dim) {
        if (rows.at != units_at(to)) return;
        pack_rows<Term>(units_at(to) + n * row_term(dim), row_units(dim), context, view, dim,
                        chunk.begin, size);
      };
      pack(keys, at.keys, p.k, dims.dim);
      pack(values, at.values, p.v, dims.dim_v);
      if constexpr (L::kPack > 1) {
        Unit* const to = units_at(at.key_pairs) + n * key_pair_term();
        AcrossRows<Term>(to, tiling.shape, dims.dim, tiling.chunk_k)
            .pack(to, p.k, dims.dim, size,
                  [&](int64 row) { return context.offset_k(p.k, chunk.begin + row); });
      }
    });
  }

  void clear_sums(Interval keys) const {
    const int64 size = keys.end - keys.begin,
                rows = kHasTiles<L> ? round_up(size, L::kLanes) : size;
    for (int64 i = 0; i < rows * wide; i += L::kLanes) L::store(reals_at(at.dk) + i, L::set(0));
    for (int64 i = 0; i < rows * wide_v; i += L::kLanes) L::store(reals_at(at.dv) + i, L::set(0));
  }

  bool is_finite(const Real* sums, int64 row, int64 width) const {
    Vec zeros = L::set(0);  // x - x is 0 for every finite x, and NaN for the others
    for (int64 d = 0; d < width; d += L::kLanes) {
      const Vec x = L::load(sums + vector_at<L>(row, d, width));
      zeros = L::add(zeros, L::sub(x, x));
    }
    return L::bits_of(L::equal(zeros, L::set(0))) == (uint64(1) << L::kLanes) - 1;
  }

  // Of a row of the chunk's sums.
  void store_row(const View& view, int64 offset, const Real* sums, int64 row, int64 dim,
                 Real factor) const {
    if (!view.given()) return;
    const int64 width = padded(tiling.shape, dim);
    for (int64 d = 0; d < dim; d += L::kLanes) {
      Vec x = L::mul(L::load(sums + vector_at<L>(row, d, width)), L::set(factor));
      if (p.accumulate) x = L::add(L::load_as(view.type, view.data, offset + d, dim - d), x);
      L::store_as(view.type, view.data, offset + d, dim - d, x);
    }
  }

  void store_chunk(Interval keys, uint8* nonfinite_k) const {
    for (int64 j = keys.begin; j < keys.end; ++j) {
      const Real *const dk = reals_at(at.dk), *const dv = reals_at(at.dv);
      const int64 row = j - keys.begin;
      if (nonfinite_k && !(is_finite(dk, row, wide) && is_finite(dv, row, wide_v))) {
        nonfinite_k[j] = 1;  // both stay as they were, for the fix-up pass to write
        continue;
      }
      store_row(p.dk, context.offset_k(p.dk, j), dk, row, dims.dim, Real(p.score.scale));
      store_row(p.dv, context.offset_k(p.dv, j), dv, row, dims.dim_v, 1);
    }
  }
};

}  // namespace
}  // namespace regard
