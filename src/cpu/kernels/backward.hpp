// Backward: one chunk of keys walks the blocks of query rows that see it.
//
// The chunk's dK and dV stay with the task; a block's dQ is added to the shared sum in the order of
// the chunks, so that no result depends on threads. The lanes are query rows wherever rows are
// scored, and head elements where gradients of keys are summed:
//   S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T (Z dP^T - delta)
//   dV += (Z P)^T dO     dK += dS^T Q     dQ^T += K^T dS^T
#pragma once

#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/stage.hpp"
#include "cpu/kernels/turn.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

// A panel and what the backward pass knows of its rows.
template <class L>
struct GradientPanel : Panel {
  typename L::Real lse[kMaxPanel];    // +inf in lanes that are not in use or saw nothing: P = 0
  typename L::Real delta[kMaxPanel];  // dout . out - dlse
};

template <class L>
struct BackwardKernel {
  static_assert(sizeof(GradientPanel<L>) <= kPanelBytes);
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;

  const Problem& p;
  const CpuTiling& tiling;
  const BackwardShared shared;
  const HeadContext context;
  const HeadSizes dims;
  const BackwardScratch at;
  char* const scratch;
  const Stage<Real> stage;
  GradientPanel<L>* const panels;
  const int64 wide, wide_v;  // padded head sizes

  BackwardKernel(const Problem& problem, const CpuTiling& tiling, const BackwardShared& shared,
                 const BackwardTask& task, char* scratch)
      : p(problem),
        tiling(tiling),
        shared(shared),
        context{problem, task.b, task.kv, sequence(problem.sequences, task.b)},
        dims{p.sizes.dim, p.sizes.dim_v},
        at(backward_scratch(tiling, dims)),
        scratch(scratch),
        stage(scratch, at.stage),
        panels(reinterpret_cast<GradientPanel<L>*>(scratch + at.panels)),
        wide(padded(tiling.shape, dims.dim)),
        wide_v(padded(tiling.shape, dims.dim_v)) {}

  Unit* units_at(int64 offset) const { return reinterpret_cast<Unit*>(scratch + offset); }
  Real* reals_at(int64 offset) const { return reinterpret_cast<Real*>(scratch + offset); }
  int64 row_units(int64 dim) const { return padded_units(tiling.shape, dim); }
  int64 block_units(int count) const { return int64(count) * kWidth / L::kPack; }

  // ------------------------------------------------------------------------------ loading a block

  // dout . out - dlse of one row. A row that sees nothing has out = 0 and takes nothing from dout.
  Real delta_of(const Panel& panel, int lane) const {
    const int64 out = context.offset_q(p.out, panel, lane);
    const int64 dout = context.offset_q(p.dout, panel, lane);
    const Vec zero = L::set(0);
    Vec sum = zero;
    for (int64 d = 0; d < dims.dim_v; d += L::kLanes) {
      const Vec x = L::load_as(p.out.type, p.out.data, out + d, dims.dim_v - d);
      const Vec y = L::load_as(p.dout.type, p.dout.data, dout + d, dims.dim_v - d);
      sum = L::add(sum, L::select(L::equal(x, zero), zero, L::mul(x, y)));
    }
    Real each[L::kLanes], delta = 0;
    L::store(each, sum);
    for (Real x : each) delta += x;
    return p.dlse.given() ? delta - row_value(p.dlse, panel, lane) : delta;
  }

  Real row_value(const View& view, const Panel& panel, int lane) const {
    Real each[L::kLanes];
    L::store(each, L::load_as(view.type, view.data, context.offset_q(view, panel, lane), 1));
    return each[0];
  }

  int load_rows(const RowBlocks& blocks, int64 block) const {
    const int64 first = blocks.first_row(block), rows = blocks.rows(block);
    int count = 0;
    for (int64 row = 0; row < rows; row += kWidth, ++count) {
      make_panels<L>(&panels[count], context, first + row, smaller<int64>(kWidth, rows - row));
    }
    return count;
  }

  void load_block(int count) const {
    for (int i = 0; i < count; ++i) {
      GradientPanel<L>& panel = panels[i];
      for (int lane = 0; lane < kWidth; ++lane) {
        panel.lse[lane] = Real(__builtin_huge_val());
        panel.delta[lane] = 0;
        if (lane >= panel.rows) continue;
        const Real lse = row_value(p.lse, panel, lane);
        if (lse != -Real(__builtin_huge_val())) panel.lse[lane] = lse;
        panel.delta[lane] = delta_of(panel, lane);
      }
      pack_lanes<L>(units_at(at.queries) + i * row_units(dims.dim) * kWidth, context, panel, p.q,
                    dims.dim);
      pack_lanes<L>(units_at(at.douts) + i * row_units(dims.dim_v) * kWidth, context, panel, p.dout,
                    dims.dim_v);
      const auto pairs = [&](int64 to, int64 width, const View& view, int64 dim) {
        pack_pairs<L>(units_at(to) + i * kWidth / L::kPack * width, width, view, dim, kWidth,
                      [&](int64 lane) {
                        return lane < panel.rows ? context.offset_q(view, panel, int(lane))
                                                 : kNoRow;
                      });
      };
      if (p.dk.given()) pairs(at.query_pairs, wide, p.q, dims.dim);
      if (p.dv.given()) pairs(at.dout_pairs, wide_v, p.dout, dims.dim_v);
    }
  }

  // ---------------------------------------------------------------------------------- one tile

  // P^T and dS^T of one panel and its keys, from S^T and dP^T, into rows `first_row` and on of the
  // block's tiles.
  void differentiate(int index, int count, Interval keys, int64 first_row, bool veiled) const {
    const GradientPanel<L>& panel = panels[index];
    const ScoreTerms<L> terms(context, panel);
    const Features on = terms.on;
    const int64 size = keys.end - keys.begin;
    const Vec zero = L::set(0);
    const bool plain = !on.softcap && !on.bias && !on.alibi && !on.signed_scale;
    Real* const scores = reals_at(at.scores);
    Real* const dweights = reals_at(at.dweights);
    const int64 row_stride = block_units(count);
    const int64 first = first_row * row_stride + index * kWidth / L::kPack;
    Unit* const weights = units_at(at.weights) + first;
    Unit* const dscores = units_at(at.dscores) + first;
    const Vec log2e = L::set(Real(kLog2E)), unit = L::set(terms.unit);
    const Vec keep = L::set(terms.keep_scale);

    for (int64 j = 0; j < size; ++j) {
      Vec weight[L::kVectors], dscore[L::kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v) {
        const int64 place = j * kWidth + v * L::kLanes;
        const Vec raw = L::load(scores + place);
        const Vec lse = L::load(panel.lse + v * L::kLanes);
        Vec logit = raw;
        if (!plain) {
          const Vec bias = on.bias ? L::load(stage.bias + place) : zero;
          logit = score<L>(on, terms.params, raw, bias, terms.alibi(v, keys.begin + j)).value;
        }
        const Vec minus_lse = L::sub(zero, lse);
        Vec whole = L::exp2(L::mul(L::fma(logit, unit, minus_lse), log2e));
        Vec dweight = L::load(dweights + place);
        weight[v] = whole;
        if (on.dropout) {
          const auto kept = L::mask_of(stage.kept[j] >> (v * L::kLanes));
          dweight = L::select(kept, L::mul(dweight, keep), zero);
          weight[v] = L::mul(whole, L::select(kept, keep, zero));
        }
        dscore[v] = L::mul(whole, L::sub(dweight, L::load(panel.delta + v * L::kLanes)));
        if (veiled) {
          const auto seen = L::mask_of(stage.visible[j] >> (v * L::kLanes));
          weight[v] = L::select(seen, weight[v], zero);
          dscore[v] = L::select(seen, dscore[v], zero);
        }
        // What the bias receives is kept as f32, where S was.
        if (shared.dbias) L::store(scores + place, dscore[v]);
        if (on.softcap) {
          dscore[v] = L::mul(dscore[v], score_slope<L>(on, terms.params, raw));
          if (veiled) {
            const auto seen = L::mask_of(stage.visible[j] >> (v * L::kLanes));
            dscore[v] = L::select(seen, dscore[v], zero);
          }
        }
      }
      if constexpr (L::kPack == 1) {
#pragma GCC unroll 4
        for (int v = 0; v < L::kVectors; ++v) {
          L::store(weights + j * row_stride + v * L::kLanes, weight[v]);
          L::store(dscores + j * row_stride + v * L::kLanes, dscore[v]);
        }
      } else {
        L::store_rounded_row(weights + j * row_stride, weight[0], weight[1]);
        L::store_rounded_row(dscores + j * row_stride, dscore[0], dscore[1]);
        // f32 again for the pairs of keys, which need the next row too.
#pragma GCC unroll 4
        for (int v = 0; v < L::kVectors; ++v) {
          L::store(dweights + j * kWidth + v * L::kLanes, dscore[v]);
        }
      }
    }
    if constexpr (L::kPack == 2) {
      for (int64 j = 0; j < size; j += 2) {
        for (int v = 0; v < L::kVectors; ++v) {
          const Real* const even = dweights + j * kWidth + v * L::kLanes;
          L::store_rounded_pairs(units_at(at.dscore_pairs) + j / 2 * kWidth + v * L::kLanes,
                                 L::load(even), j + 1 < size ? L::load(even + kWidth) : zero);
        }
      }
    }
  }

  // Adds the panel's dS, still [key][panel] in the scores' place, to the bias gradient.
  void add_bias_gradient(const Panel& panel, Interval keys) const {
    Real* const ds = reals_at(at.scores);
    Real* const sum = static_cast<Real*>(shared.dbias);
    const Strides& to = shared.dbias_strides;
    const int64 size = keys.end - keys.begin;
    const bool rows_apart = to.row != 0 || p.bias_sizes[2] > 1;
    for (int v = 0; v < L::kVectors; ++v) {
      for (int64 j = 0; j < size; j += L::kLanes) {
        Vec tile[L::kLanes];
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) {
          tile[t] = j + t < size ? L::load(ds + (j + t) * kWidth + v * L::kLanes) : L::set(0);
        }
        L::transpose(tile);
        for (int t = 0; t < L::kLanes; ++t) {
          const int lane = v * L::kLanes + t;
          if (lane >= panel.rows) break;
          const int64 offset = offset_of(to, context.b, panel.head[lane], 0, panel.query[lane]) +
                               (keys.begin + j) * to.column;
          if (to.column == 1 && rows_apart && j + L::kLanes <= size) {
            L::store(sum + offset, L::add(L::load(sum + offset), tile[t]));
            continue;
          }
          Real each[L::kLanes];
          L::store(each, tile[t]);
          for (int64 e = 0; e < L::kLanes && j + e < size; ++e) {
            sum[offset + e * to.column] += each[e];
          }
        }
      }
    }
  }

  // One block of query rows against one key block of the chunk.
  void attend(int count, int64 chunk_begin, Interval block) const {
    bool reached = false;
    for (int i = 0; i < count; ++i) {
      const Interval keys = seen_part<L>(panels[i], block);
      clear_unseen(i, count, block, keys);
      if (keys.empty()) continue;
      reached = true;
      attend_panel(i, count, chunk_begin, block, keys);
    }
    if (!reached) return;
    const int64 size = block.end - block.begin, from = block.begin - chunk_begin;
    const auto add_keys = [&](int64 a, int64 b, int64 c, int64 width) {
      multiply_wide<L, Walk::rows, Result::add>({.a = units_at(a),
                                                 .lda = block_units(count),
                                                 .b = units_at(b),
                                                 .ldb = width,
                                                 .c = reals_at(c) + from * width,
                                                 .ldc = width,
                                                 .m = size,
                                                 .k = block_units(count)},
                                                width / L::kLanes);
    };
    if (p.dv.given()) add_keys(at.weights, at.dout_pairs, at.dv, wide_v);
    if (p.dk.given()) add_keys(at.dscores, at.query_pairs, at.dk, wide);
  }

  // One panel against the keys of the block that it sees: its part of P, dS and dQ.
  void attend_panel(int index, int count, int64 chunk_begin, Interval block, Interval keys) const {
    const CpuShape& shape = tiling.shape;
    const GradientPanel<L>& panel = panels[index];
    const int64 size = keys.end - keys.begin, from = keys.begin - chunk_begin;
    const auto score = [&](int64 a, int64 b, int64 c, int64 dim) {
      multiply<L, L::kVectors, Walk::rows, Result::replace>(
          {.a = units_at(a) + from * row_units(dim),
           .lda = row_units(dim),
           .b = units_at(b) + index * row_units(dim) * kWidth,
           .ldb = kWidth,
           .c = reals_at(c),
           .ldc = kWidth,
           .m = size,
           .k = units(shape, dim)});
    };
    score(at.keys, at.queries, at.scores, dims.dim);
    score(at.values, at.douts, at.dweights, dims.dim_v);
    const bool veiled = stage_block<L>(stage, context, panel, keys);
    differentiate(index, count, keys, keys.begin - block.begin, veiled);
    if (shared.dbias) add_bias_gradient(panel, keys);
    if (!p.dq.given()) return;
    const bool pairs = L::kPack > 1;
    const int64 rows = pairs ? kWidth : block_units(count);
    multiply<L, L::kVectors, Walk::columns, Result::add>(
        {.a = units_at(at.key_pairs) + from / L::kPack * wide,
         .lda = wide,
         .b = units_at(at.dscore_pairs) +
              (pairs ? 0 : (keys.begin - block.begin) * rows + index * kWidth),
         .ldb = rows,
         .c = reals_at(at.dq) + index * dims.dim * kWidth,
         .ldc = kWidth,
         .m = dims.dim,
         .k = units(shape, size)});
  }

  // Keys of the block that a panel does not see get nothing from it in dK and dV.
  void clear_unseen(int index, int count, Interval block, Interval keys) const {
    const int64 row = block_units(count), width = kWidth / L::kPack;
    for (int64 j = block.begin; j < block.end; ++j) {
      if (keys.contains(j)) continue;
      const int64 first = (j - block.begin) * row + index * width;
      for (int64 u = first; u < first + width; ++u) {
        units_at(at.weights)[u] = 0;
        units_at(at.dscores)[u] = 0;
      }
    }
  }

  // ---------------------------------------------------------------------------------- one task

  Interval chunk_keys(int64 chunk) const {
    const int64 begin = chunk * tiling.chunk_k;
    return {begin, smaller(begin + tiling.chunk_k, context.seq.len_k)};
  }

  void load_chunk(Interval keys) const {
    const int64 size = keys.end - keys.begin;
    const auto rows = [&](int64 to, const View& view, int64 dim) {
      pack_rows<L>(units_at(to), row_units(dim), context, view, dim, keys.begin, size);
    };
    rows(at.keys, p.k, dims.dim);
    rows(at.values, p.v, dims.dim_v);
    if constexpr (L::kPack > 1) {
      pack_pairs<L>(units_at(at.key_pairs), wide, p.k, dims.dim, size,
                    [&](int64 row) { return context.offset_k(p.k, keys.begin + row); });
    }
    for (int64 i = 0; i < size * wide; i += L::kLanes) L::store(reals_at(at.dk) + i, L::set(0));
    for (int64 i = 0; i < size * wide_v; i += L::kLanes) L::store(reals_at(at.dv) + i, L::set(0));
  }

  bool is_finite(const Real* row, int64 width) const {
    Vec zeros = L::set(0);  // x - x is 0 for every finite x, and NaN for the others
    for (int64 d = 0; d < width; d += L::kLanes) {
      const Vec x = L::load(row + d);
      zeros = L::add(zeros, L::sub(x, x));
    }
    return L::bits_of(L::equal(zeros, L::set(0))) == (uint64(1) << L::kLanes) - 1;
  }

  void store_row(const View& view, int64 row, const Real* sums, int64 dim, Real factor) const {
    if (!view.given()) return;
    const int64 offset = context.offset_k(view, row);
    for (int64 d = 0; d < dim; d += L::kLanes) {
      Vec x = L::mul(L::load(sums + d), L::set(factor));
      if (p.accumulate) x = L::add(L::load_as(view.type, view.data, offset + d, dim - d), x);
      L::store_as(view.type, view.data, offset + d, dim - d, x);
    }
  }

  void store_keys(Interval keys) const {
    for (int64 j = keys.begin; j < keys.end; ++j) {
      const Real* const dk = reals_at(at.dk) + (j - keys.begin) * wide;
      const Real* const dv = reals_at(at.dv) + (j - keys.begin) * wide_v;
      if (shared.spoiled_k && !(is_finite(dk, wide) && is_finite(dv, wide_v))) {
        shared.spoiled_k[j] = 1;  // both are left as they were, for the redo to write
        continue;
      }
      store_row(p.dk, j, dk, dims.dim, Real(p.score.scale));
      store_row(p.dv, j, dv, dims.dim_v, 1);
    }
  }

  // Adds this chunk's dQ of a block to the shared sum when its turn has come; the last chunk that
  // the block sees writes the result.
  void share_dq(int count, int64 block, int64 chunk, Interval seen, uint8* spoiled) const {
    const int64 first = seen.begin / tiling.chunk_k, last = (seen.end - 1) / tiling.chunk_k;
    const int64 panel_size = dims.dim * kWidth;
    Real* const sum =
        static_cast<Real*>(shared.dq) + block * (tiling.block_q / kWidth) * panel_size;
    Real* const own = reals_at(at.dq);
    if (chunk > first) {
      wait_for_turn(shared.turn + block, int32(chunk));
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(own + i, L::add(L::load(sum + i), L::load(own + i)));
      }
    }
    if (chunk < last) {
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(sum + i, L::load(own + i));
      }
      pass_turn(shared.turn + block, int32(chunk + 1));
    } else {
      write_dq(count, spoiled);
    }
  }

  void write_dq(int count, uint8* spoiled) const {
    Real factor[kWidth];
    for (Real& x : factor) x = Real(p.score.scale);
    for (int i = 0; i < count; ++i) {
      const Real* const sums = reals_at(at.dq) + i * dims.dim * kWidth;
      const uint64 bad = spoiled ? spoiled_lanes<L>(sums, panels[i], dims.dim) : 0;
      store_lanes<L>(sums, factor, context, panels[i], p.dq, dims.dim, p.accumulate, bad);
      for (int lane = 0; spoiled && lane < panels[i].rows; ++lane) {
        spoiled[panels[i].first + lane] = bad >> lane & 1;
      }
    }
  }

  void run_task(int64 chunk, uint8* spoiled) const {
    const Interval keys = chunk_keys(chunk);
    const RowBlocks blocks(tiling, context.seq.len_q, p.sizes.group());
    if (!keys.empty()) load_chunk(keys);
    // Blocks in descending order: under a causal mask every chunk then begins with the blocks that
    // all chunks see, and none waits for another to catch up.
    for (int64 block = context.seq.len_q > 0 ? blocks.count() - 1 : -1; block >= 0; --block) {
      const int count = load_rows(blocks, block);
      Interval seen = panels[0].hull;
      for (int i = 1; i < count; ++i) {
        if (panels[i].hull.empty()) continue;
        if (seen.empty()) seen = panels[i].hull;
        seen = {smaller(seen.begin, panels[i].hull.begin), larger(seen.end, panels[i].hull.end)};
      }
      const bool reached = seen.begin < keys.end && keys.begin < seen.end;
      const bool nobody = seen.empty() && chunk == 0;
      if (!reached && !nobody) continue;
      if (p.dq.given()) {
        for (int64 i = 0; i < count * dims.dim * kWidth; i += L::kLanes) {
          L::store(reals_at(at.dq) + i, L::set(0));
        }
      }
      if (nobody) {
        if (p.dq.given()) write_dq(count, spoiled);
        continue;
      }
      load_block(count);
      const Interval part{larger(keys.begin, seen.begin), smaller(keys.end, seen.end)};
      for (int64 j = part.begin / tiling.block_k * tiling.block_k; j < part.end;
           j += tiling.block_k) {
        attend(count, keys.begin, {j, smaller(keys.end, j + tiling.block_k)});
      }
      if (p.dq.given()) share_dq(count, block, chunk, seen, spoiled);
    }
    if (!keys.empty()) store_keys(keys);
  }
};

template <class L>
void run_backward(const Problem& problem, const CpuTiling& tiling, const BackwardShared& shared,
                  const BackwardTask& task, Spoiled spoiled, char* scratch) {
  BackwardKernel<L>(problem, tiling, shared, task, scratch).run_task(task.chunk, spoiled.rows);
}

}  // namespace
}  // namespace regard
