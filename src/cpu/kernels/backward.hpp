// Backward: one task has a chunk of keys and loops over the blocks of query rows that see it.
//
// dK and dV of the chunk stay with the task. dQ of a block is added to a shared sum in the order of
// the chunks, so that no result depends on threads. The lanes are query rows where rows are scored,
// and head elements where gradients of keys are summed:
//   S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T (Z dP^T - delta)
//   dV += (Z P)^T dO     dK += dS^T Q     dQ^T += K^T dS^T
#pragma once

#include "cpu/kernels/dq_order.hpp"
#include "cpu/kernels/few_rows.hpp"
#include "cpu/kernels/gradient_tiles.hpp"
#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class L>
struct BackwardKernel : GradientTiles<L> {
  using Tiles = GradientTiles<L>;
  using Tiles::block_units, Tiles::reals_at, Tiles::row_units, Tiles::units_at;
  using Tiles::kWidth, Tiles::p, Tiles::tiling, Tiles::context, Tiles::dims, Tiles::at;
  using Tiles::panels, Tiles::scratch, Tiles::wide, Tiles::wide_v;
  using typename Tiles::Real, typename Tiles::Unit, typename Tiles::Vec;

  const BackwardShared shared;
  const Stage<Real> stage;

  BackwardKernel(const Problem& problem, const CpuTiling& cpu_tiling,
                 const BackwardShared& shared_arrays, const BackwardTask& task, char* memory)
      : Tiles(problem, cpu_tiling, task, memory), shared(shared_arrays), stage(scratch, at.stage) {}

  // ---------------------------------------------------------------------------------- one tile

  // Makes P^T and dS^T of one panel from S^T and dP^T, in the block's tiles from `first_row` on.
  void differentiate(int index, int count, Interval keys, int64 first_row, bool may_hide) const {
    const GradientPanel<L>& panel = panels[index];
    const ScoreTerms<L> terms(context, panel);
    const Features on = terms.on;
    const int64 size = keys.end - keys.begin;
    const Vec zero = L::set(0);
    const bool plain = is_plain(on);
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
        const int64 pair = j * kWidth + v * L::kLanes;
        const Vec raw = L::load(scores + pair);
        const Vec lse = L::load(panel.lse + v * L::kLanes);
        Vec logit = raw;
        if (!plain) {
          const Vec bias = on.bias ? L::load(stage.bias + pair) : zero;
          logit = terms.value(raw, bias, v, keys.begin + j);
        }
        const Vec minus_lse = L::sub(zero, lse);
        Vec whole = L::exp2(L::mul(L::fma(logit, unit, minus_lse), log2e));
        Vec dweight = L::load(dweights + pair);
        weight[v] = whole;
        if (on.dropout) {
          const auto kept = L::mask_of(stage.kept[j] >> (v * L::kLanes));
          dweight = L::select(kept, L::mul(dweight, keep), zero);
          weight[v] = L::mul(whole, L::select(kept, keep, zero));
        }
        dscore[v] = L::mul(whole, L::sub(dweight, L::load(panel.delta + v * L::kLanes)));
        if (may_hide) {
          const auto seen = L::mask_of(stage.visible[j] >> (v * L::kLanes));
          weight[v] = L::select(seen, weight[v], zero);
          dscore[v] = L::select(seen, dscore[v], zero);
        }
        // dbias needs dS in f32, in place of S.
        if (shared.dbias.given()) L::store(scores + pair, dscore[v]);
        if (has_slope(on)) {
          dscore[v] = L::mul(dscore[v], score_slope<L>(on, terms.params, raw));
          if (may_hide) {
            const auto seen = L::mask_of(stage.visible[j] >> (v * L::kLanes));
            dscore[v] = L::select(seen, dscore[v], zero);
          }
        }
      }
      store_key(weights + j * row_stride, dscores + j * row_stride, weight, dscore);
    }
    if constexpr (L::kPack == 2) pack_dscores(dscores, row_stride, size);
  }

  // Writes P and dS of a key as Units.
  REGARD_INLINE void store_key(Unit* weights, Unit* dscores, const Vec (&weight)[L::kVectors],
                               const Vec (&dscore)[L::kVectors]) const {
    if constexpr (L::kPack == 2) {
      const int64 term = kTerms<L> > 1 ? this->tile_term() : 0;
      each_term<L>([&]<class Term>(int n) __attribute__((always_inline)) {
        Term::store_rounded_row(weights + n * term, weight[0], weight[1]);
        Term::store_rounded_row(dscores + n * term, dscore[0], dscore[1]);
      });
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v) {
        L::store(weights + v * L::kLanes, weight[v]);
        L::store(dscores + v * L::kLanes, dscore[v]);
      }
    }
  }
  // dS in pairs of keys, from its rows.
  void pack_dscores(const Unit* rows, int64 row_stride, int64 keys) const {
    for (int n = 0; n < kTerms<L>; ++n) {
      pack_term(units_at(at.dscore_pairs) + n * this->dscore_pair_term(),
                rows + n * this->tile_term(), row_stride, keys);
    }
  }
  static void pack_term(Unit* pairs, const Unit* rows, int64 row_stride, int64 keys) {
    static constexpr Unit kZeros[kWidth / L::kPack] = {};
    for (int64 j = 0; j < keys; j += 2) {
      const Unit* const even = rows + j * row_stride;
      const Unit* const odd = j + 1 < keys ? even + row_stride : kZeros;
#pragma GCC unroll 2
      for (int v = 0; v < L::kVectors; ++v) {
        L::store(reinterpret_cast<Real*>(pairs + j / 2 * kWidth + v * L::kLanes),
                 L::half_of_pairs(even, odd, v > 0));
      }
    }
    for (int v = 0; v < L::kVectors; ++v) {
      clear_last_tile<L>(pairs + v * L::kLanes, kWidth, keys);
    }
  }

  // Adds the panel's dS, still [key][panel] in place of the scores, to the bias gradient.
  void add_bias_gradient(const Panel& panel, Interval keys) const {
    Real* const ds = reals_at(at.scores);
    const int64 step = shared.dbias.strides.column;
    const int64 size = keys.end - keys.begin;
    for (int v = 0; v < L::kVectors; ++v) {
      for (int64 j = 0; j < size; j += L::kLanes) {
        Vec tile[L::kLanes];
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) {
          tile[t] = j + t < size ? L::load(ds + (j + t) * kWidth + v * L::kLanes) : L::set(0);
        }
        L::transpose(tile);
        // Lanes that share elements are summed first: sums of sums lose less.
        for (int t = 0; t < L::kLanes && v * L::kLanes + t < panel.rows; ++t) {
          Vec sums = tile[t];
          const int64 offset = offset_of_lane(panel, v * L::kLanes + t);
          while (t + 1 < L::kLanes && v * L::kLanes + t + 1 < panel.rows &&
                 offset_of_lane(panel, v * L::kLanes + t + 1) == offset) {
            sums = L::add(sums, tile[++t]);
          }
          add_to_row(offset + (keys.begin + j) * step, smaller<int64>(size - j, L::kLanes), sums);
        }
      }
    }
  }

  int64 offset_of_lane(const Panel& panel, int lane) const {
    return offset_of(shared.dbias.strides, context.b, panel.head[lane], 0, panel.query[lane]);
  }

  // Adds the first `count` lanes to elements of dbias, from an offset on.
  void add_to_row(int64 offset, int64 count, Vec x) const {
    const View& to = shared.dbias;
    const auto add = [&](int64 at, int64 lanes, Vec term) {
      L::store_as(to.type, to.data, at, lanes,
                  L::add(L::load_as(to.type, to.data, at, lanes), term));
    };
    if (to.strides.column == 1) return add(offset, count, x);
    Real each[L::kLanes], total = 0;
    L::store(each, x);
    for (int64 e = 0; e < count; ++e) {
      if (to.strides.column == 0)
        total += each[e];
      else
        add(offset + e * to.strides.column, 1, L::set(each[e]));
    }
    if (to.strides.column == 0) add(offset, 1, L::set(total));
  }

  // One block of query rows and one key block of the chunk.
  void attend(int count, int64 chunk_begin, const KeyBlocks& blocks, Interval block) const {
    if (!set_tiles<L>(panels, count, context, blocks, block)) return;
    for (int i = 0; i < count; ++i) {
      const Interval keys = panels[i].tile.keys;
      if (!keys.empty()) attend_panel(i, count, chunk_begin, block, keys);
    }
    for (PanelRun run = run_from(0, count); run.first < count; run = run_from(run.end, count)) {
      add_run(run, count, chunk_begin, block);
    }
  }

  // Panels that follow one another, and keys of the block that hold what they see.
  struct PanelRun {
    int first, end;
    Interval keys;
  };
  // The first run from a panel on: a longer product reads and writes its sums less often, but at
  // most a third of its pairs may be those that the panels do not see.
  PanelRun run_from(int first, int count) const {
    while (first < count && panels[first].tile.keys.empty()) ++first;
    PanelRun run{first, first, {}};
    for (int64 pairs = 0; run.end < count; ++run.end) {
      const Interval own = panels[run.end].tile.keys, keys = hull(run.keys, own);
      pairs += own.end - own.begin;
      const int64 all = (run.end + 1 - first) * (keys.end - keys.begin);
      if (own.empty() || 2 * all > 3 * pairs) break;
      run.keys = keys;
    }
    return run;
  }

  // Adds what the rows of some panels give to dV and dK of the keys that they see.
  void add_run(const PanelRun& run, int count, int64 chunk_begin, Interval block) const {
    for (int i = run.first; i < run.end; ++i) clear_unseen(i, count, block, run.keys);
    const int64 row = block_units(count), first = block_units(run.first);
    const int64 from = (run.keys.begin - block.begin) * row + first;
    // The product of both second terms is left out: P and dS are rounded more than that.
    const auto add_keys = [&](int64 a, int64 b, int64 c, int64 width) {
      multiply_wide<L, Walk::rows, Result::add>(
          {.a = units_at(a) + from,
           .lda = row,
           .b = units_at(b) + first * width,
           .ldb = width,
           .c = reals_at(c) + (run.keys.begin - chunk_begin) * width,
           .ldc = width,
           .m = run.keys.end - run.keys.begin,
           .k = block_units(run.end - run.first),
           .a_term = this->tile_term(),
           .b_term = this->row_pair_term(width),
           .skipped_pairs = kTerms<L> - 1},
          width / L::kLanes);
    };
    if (p.dv.given()) add_keys(at.weights, at.dout_pairs, at.dv, wide_v);
    if (p.dk.given()) add_keys(at.dscores, at.query_pairs, at.dk, wide);
  }

  // One panel and the keys of the block that it sees: its part of P, dS and dQ.
  void attend_panel(int index, int count, int64 chunk_begin, Interval block, Interval keys) const {
    const CpuShape& shape = tiling.shape;
    const GradientPanel<L>& panel = panels[index];
    const int64 size = keys.end - keys.begin, from = keys.begin - chunk_begin;
    // The rows of the first vector may not see the last keys.
    const int64 seen = divide_up(keys_of_first_vector<L>(panel), L::kPack);
    const auto score = [&](int64 a, int64 b, int64 c, int64 dim) {
      multiply_long_rows<L>({.a = units_at(a) + from * row_units(dim),
                             .lda = row_units(dim),
                             .b = this->lanes_at(b, dim, index),
                             .ldb = kWidth,
                             .c = reals_at(c),
                             .ldc = kWidth,
                             .m = size,
                             .k = units(shape, dim),
                             .a_term = this->row_term(dim),
                             .b_term = this->lane_term(dim)},
                            L::kVectors, seen * L::kPack);
    };
    if (scores_few_rows()) {
      score_few_rows(keys);
    } else {
      score(at.keys, at.queries, at.scores, dims.dim);
    }
    score(at.values, at.douts, at.dweights, dims.dim_v);
    const bool may_hide = stage_block<L>(stage, context, panel) < size;
    differentiate(index, count, keys, keys.begin - block.begin, may_hide);
    if (shared.dbias.given()) add_bias_gradient(panel, keys);
    if (!p.dq.given()) return;
    const bool pairs = L::kPack > 1;
    const int64 rows = pairs ? kWidth : block_units(count);
    multiply<L, L::kVectors, AcrossRows<L>::kWalk, Result::add>(
        {.a = this->key_pairs().from(from),
         .lda = this->key_pairs().stride,
         .b = units_at(at.dscore_pairs) +
              (pairs ? 0 : (keys.begin - block.begin) * rows + index * kWidth),
         .ldb = rows,
         .c = reals_at(at.dq) + index * wide * kWidth,
         .ldc = kWidth,
         .m = dims.dim,
         .k = units(shape, size),
         .late = kHasTiles<L> ? 0 : units(shape, size) - seen,
         .a_in_tiles = AcrossRows<L>::kInTiles,
         .a_term = this->key_pair_term(),
         .b_term = this->dscore_pair_term(),
         .skipped_pairs = kTerms<L> - 1});
  }

  // Whether S is summed as few rows of the forward pass sum it. In another order it differs by more
  // than the terms of dq leave where they cancel.
  bool scores_few_rows() const {
    return kMostFewRows<L> > 0 && has_few_rows(tiling.shape, context.seq.len_q, p.sizes.group());
  }
  // Calls with the rows of the only panel, unless all such panels have other lanes.
  template <class Call>
  void with_few_rows(Call call) const {
    if constexpr (kMostFewRows<L> > 0 && L::kVectors == 1) {
      call(FewRows<L, int(kMostFewRows<L>)>(context, dims, scratch, at.few));
    }
  }
  void score_few_rows(Interval keys) const {
    with_few_rows([&](const auto& rows) {
      constexpr int kRows = int(kMostFewRows<L>);
      Real* const few = reals_at(at.few.scores);
      Real* to = reals_at(at.scores);
      for (int64 j = keys.begin; j < keys.end; j += kFewRowsKeys) {
        const Interval some{j, smaller(keys.end, j + kFewRowsKeys)};
        rows.multiply_keys(some, few);
        for (int64 n = 0; n < some.end - some.begin; ++n, to += kWidth) {
          for (int lane = 0; lane < kWidth; ++lane) {
            to[lane] = lane < kRows ? few[n * kRows + lane] : Real(0);
          }
        }
      }
    });
  }

  // Keys of a run that a panel does not see receive nothing from it in dK and dV.
  void clear_unseen(int index, int count, Interval block, Interval keys) const {
    const int64 row = block_units(count), width = kWidth / L::kPack;
    for (int64 j = keys.begin; j < keys.end; ++j) {
      if (panels[index].tile.keys.contains(j)) continue;
      const int64 first = (j - block.begin) * row + index * width;
      for (int n = 0; n < kTerms<L>; ++n) {
        for (int64 u = first; u < first + width; ++u) {
          units_at(at.weights)[n * this->tile_term() + u] = 0;
          units_at(at.dscores)[n * this->tile_term() + u] = 0;
        }
      }
    }
  }

  // ---------------------------------------------------------------------------------- one task

  // Adds this chunk's dQ of a block to the shared sum, after the chunks before it that visit the
  // block. `next` visits it after this one; if that is kNone, this one writes the result.
  void share_dq(int count, int64 block, int64 chunk, bool is_first, int64 next,
                uint8* nonfinite) const {
    const int64 panel_size = wide * kWidth;
    Real* const sum =
        static_cast<Real*>(shared.dq) + block * (tiling.block_q / kWidth) * panel_size;
    Real* const own = reals_at(at.dq);
    if (!is_first) {
      wait_for_chunk(shared.next_chunk + block, int32(chunk));
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(own + i, L::add(L::load(sum + i), L::load(own + i)));
      }
    }
    if (next != kNone) {
      for (int64 i = 0; i < count * panel_size; i += L::kLanes) {
        L::store(sum + i, L::load(own + i));
      }
      release_chunk(shared.next_chunk + block, int32(next));
    } else {
      write_dq(count, nonfinite);
    }
  }

  void write_dq(int count, uint8* nonfinite) const {
    Real factor[kWidth], held[kWidth];
    for (Real& x : factor) x = Real(p.score.scale);
    for (Real& x : held) x = 1;
    for (int i = 0; i < count; ++i) {
      const Real* const sums = reals_at(at.dq) + i * wide * kWidth;
      const uint64 bad = nonfinite ? nonfinite_lanes<L>(sums, panels[i], dims.dim) : 0;
      store_lanes<L>(sums, factor, context, panels[i], p.dq, dims.dim,
                     p.accumulate ? held : nullptr, bad);
      for (int lane = 0; nonfinite && lane < panels[i].rows; ++lane) {
        nonfinite[panels[i].first + lane] = bad >> lane & 1;
      }
    }
  }

  void visit_block(const RowBlocks& blocks, int64 block, const BackwardTask& task, Interval keys,
                   uint8* nonfinite) const {
    const int count = make_panels<L>(panels, context, blocks.first_row(block), blocks.rows(block));
    const SpanReach reach = context.reach_of(task.reach, panels[0]);
    const IntervalSet seen = keys_seen(blocks, block, reach, count);
    const Interval rows{panels[0].query[0], panels[0].query[0] + blocks.rows(block)};
    const auto chunk_from = [&](int64 chunk) {
      const KeyChunks chunks(tiling, context.seq.len_k);
      return next_keys(chunks, reach.rows_of_keys, seen, rows, chunk);
    };
    const int64 first = chunk_from(0);
    const bool nobody = first == kNone && task.chunk == 0;
    if (!nobody && chunk_from(task.chunk) != task.chunk) return;
    if (p.dq.given()) {
      for (int64 i = 0; i < count * wide * kWidth; i += L::kLanes) {
        L::store(reals_at(at.dq) + i, L::set(0));
      }
    }
    if (nobody) {
      if (p.dq.given()) write_dq(count, nonfinite);
      return;
    }
    const Interval part = seen.within(keys);
    const KeyBlocks key_blocks{keys, tiling.block_k};
    const auto each_block_until = [&](auto visit) {
      for (int64 j = part.begin / tiling.block_k * tiling.block_k; j < part.end;
           j += tiling.block_k) {
        if (visit(Interval{j, smaller(keys.end, j + tiling.block_k)})) return true;
      }
      return false;
    };
    // Rows are packed only where some pair is visible.
    if (each_block_until([&](Interval block_k) {
          return set_tiles<L>(panels, count, context, key_blocks, block_k);
        })) {
      this->load_block(count);
      if (scores_few_rows()) with_few_rows([&](const auto& rows) { rows.begin(panels[0]); });
      each_block_until(
          [&](Interval block_k) { return attend(count, keys.begin, key_blocks, block_k), false; });
    }
    if (!p.dq.given()) return;
    share_dq(count, block, task.chunk, first == task.chunk, chunk_from(task.chunk + 1), nonfinite);
  }

  // The keys that the rows of a block see, the same for every chunk of keys.
  IntervalSet keys_seen(const RowBlocks& blocks, int64 block, const SpanReach& reach,
                        int count) const {
    if (reach.keys_of_rows.known()) return reach.keys_of_rows[block % blocks.per_head()];
    IntervalSet seen;
    seen.add(seen_by(panels, count));
    return seen;
  }

  void run_task(const BackwardTask& task, uint8* nonfinite) const {
    const Interval keys = this->chunk_keys(task.chunk);
    const RowBlocks blocks(tiling, context.seq.len_q, p.sizes.group());
    const Interval visited = visited_blocks(p.mask_params, blocks, context.seq, keys);
    this->clear_sums(keys);
    if (!visited.empty()) {
      this->load_chunk(keys);
      // Blocks in descending order: under a causal mask every chunk begins with the blocks that all
      // chunks see, and none waits for another to catch up.
      const int64 step = blocks.packs_gqa ? blocks.count() : blocks.per_head();
      for (int64 head = blocks.count() / step - 1; head >= 0; --head) {
        // The first chunk visits what nobody sees, too.
        const bool asks = task.reach && !blocks.packs_gqa && task.chunk > 0;
        const SpanReach reach = asks ? task.reach[head] : SpanReach{};
        const auto before = [&](int64 end) {
          return previous_rows(blocks, reach, task.chunk, keys, end);
        };
        for (int64 n = visited.end; (n = before(n)) >= visited.begin;) {
          visit_block(blocks, head * step + n, task, keys, nonfinite);
        }
      }
    }
    this->store_chunk(keys, shared.nonfinite_k);
  }
};

template <class L>
void run_backward(const Problem& problem, const CpuTiling& tiling, const BackwardShared& shared,
                  const BackwardTask& task, uint8* nonfinite, char* scratch) {
  [[maybe_unused]] const TileSession<L> session;
  BackwardKernel<L>(problem, tiling, shared, task, scratch).run_task(task, nonfinite);
}

}  // namespace
}  // namespace regard
