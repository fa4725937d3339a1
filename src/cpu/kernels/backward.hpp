// Backward: one task has a chunk of keys and loops over the blocks of query rows that see it.
//
// dK and dV of the chunk stay with the task. dQ of a block is added to a shared sum in the order of
// the chunks, so that no result depends on threads. The lanes are query rows where rows are scored,
// and head elements where gradients of keys are summed:
//   S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T (Z dP^T - delta)
//   dV += (Z P)^T dO     dK += dS^T Q     dQ^T += K^T dS^T
#pragma once

#include "cpu/kernels/ahead.hpp"
#include "cpu/kernels/bias_sums.hpp"
#include "cpu/kernels/few_rows.hpp"
#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/query_gradients.hpp"
#include "cpu/kernels/score_gradients.hpp"

namespace regard {
namespace {

template <class L>
struct BackwardKernel : QueryGradients<L> {
  using Queries = QueryGradients<L>;
  using Queries::block_units, Queries::reals_at, Queries::row_units, Queries::units_at;
  using Queries::clear_dq, Queries::share_dq, Queries::write_dq;
  using Queries::dscore_pairs, Queries::multiply_kept_dscores;
  using Queries::kWidth, Queries::p, Queries::tiling, Queries::context, Queries::dims, Queries::at;
  using Queries::panels, Queries::scratch, Queries::shared, Queries::wide, Queries::wide_v;
  using Queries::rows_in_products, Queries::vectors_in_products;
  using typename Queries::Real, typename Queries::Unit, typename Queries::Vec;

  const Stage<Real> stage;

  BackwardKernel(const Problem& problem, const CpuTiling& cpu_tiling,
                 const BackwardShared& shared_arrays, const BackwardTask& task, char* memory)
      : Queries(problem, cpu_tiling, shared_arrays, task, memory), stage(scratch, at.stage) {}

  // ------------------------------------------------------------------- where P and dS are stored

  // A panel's keys of a block.
  struct Tile {
    int index = -1;  // of the panel; none: there is no such tile
    int count = 0;   // of panels
    Interval keys;
    int64 block_row = 0, chunk_row = 0;  // of the first key
    int buffer = 0;                      // of its scores and dP
  };

  // Where a panel's Units of a key of the block lie in P and dS.
  int64 of_key(int64 row, int index, int count) const {
    return vector_at<L>(row, index * kWidth / L::kPack, block_units(count));
  }
  GradientRows<L> rows_of(const Tile& tile) const {
    Unit* const weights = units_at(at.weights);
    return {.weights = weights + of_key(tile.block_row, tile.index, tile.count),
            .to_dscores = units_at(at.dscores) - weights,
            .row = tile.block_row,
            .width = block_units(tile.count),
            .term = kTerms<L> > 1 ? this->tile_term() : 0,
            .pairs = dscore_pairs(tile.index, tile.chunk_row),
            .pair_term = this->dscore_pair_term()};
  }
  PlainGradients<L> gradients_of(const Tile& tile) const {
    const GradientPanel<L>& panel = panels[tile.index];
    const Real unit = logit_unit(p.features, score_params<L>(p));
    return {unit, panel.lse, panel.delta, scores_of(tile), dweights_of(tile)};
  }

  // ------------------------------------------------------- a block of rows and a block of keys

  // One block of query rows and one key block of the chunk.
  void attend(int count, int64 chunk_begin, const KeyBlocks& blocks, Interval block,
              bool is_first_visit) const {
    if (!set_tiles<L>(panels, count, context, blocks, block)) return;
    attend_panels(count, chunk_begin, block, is_first_visit);
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
    const int last = run.end - 1;
    const int64 row = block_units(count), first = block_units(run.first);
    const int64 from = of_key(run.keys.begin - block.begin, run.first, count);
    // The product of both second terms is left out: P and dS are rounded more than that.
    const auto add_keys = [&](int64 a, const RowsOfUnits<L>& b, int64 c, int64 width) {
      multiply_wide<L, Walk::rows, Result::add>(
          {.a = units_at(a) + from,
           .lda = row,
           .b = b.at + first * b.stride,
           .ldb = b.stride,
           .c = reals_at(c) + (run.keys.begin - chunk_begin) * width,
           .ldc = width,
           .m = run.keys.end - run.keys.begin,
           .k = block_units(last - run.first) + units(tiling.shape, rows_in_products(last)),
           .a_in_tiles = kHasTiles<L>,
           .b_in_tiles = kHasTiles<L>,
           .c_in_tiles = kHasTiles<L>,
           .a_term = this->tile_term(),
           .b_term = this->row_pair_term(width),
           .skipped_pairs = kTerms<L> - 1},
          width / L::kLanes);
    };
    if (p.dv.given()) add_keys(at.weights, this->dout_rows(count), at.dv, wide_v);
    if (p.dk.given()) add_keys(at.dscores, this->query_rows(count), at.dk, wide);
  }

  // ------------------------------------------------------------------- a panel and a block's keys

  Real* scores_of(const Tile& tile) const {
    return reals_at(at.scores) + tile.buffer * tiling.block_k * kWidth;
  }
  Real* dweights_of(const Tile& tile) const {
    return reals_at(at.dweights) + tile.buffer * tiling.block_k * kWidth;
  }
  // How many keys the rows of the first vector see, in Units: the last ones may be hidden.
  int64 seen_of(const Tile& tile) const {
    return divide_up(keys_of_first_vector<L>(panels[tile.index]), L::kPack);
  }

  // Prefetches rows of keys or values from one on, at the pace of a product.
  Ahead ahead_of(const RowsOfUnits<L>& rows, int64 first, int64 dim) const {
    constexpr int64 kSize = sizeof(Unit);
    return Ahead::of_bytes(reinterpret_cast<uint64>(rows.at + first * rows.stride),
                           units(tiling.shape, dim) * kSize, rows.stride * kSize,
                           2 * L::kRows * kSize);
  }

  // S^T = K Q^T and dP^T = V dO^T.
  template <class Beside>
  void score(const Tile& tile, Beside& beside_keys, Beside& beside_values) const {
    const auto multiply_rows = [&](const RowsOfUnits<L>& a, int64 b, Real* to, int64 dim,
                                   Beside& beside) {
      multiply_long_rows<L>({.a = a.at + tile.chunk_row * a.stride,
                             .lda = a.stride,
                             .b = this->lanes_at(b, dim, tile.index),
                             .ldb = kWidth,
                             .c = to,
                             .ldc = kWidth,
                             .m = tile.keys.end - tile.keys.begin,
                             .k = units(tiling.shape, dim),
                             .a_in_tiles = kHasTiles<L>,
                             .a_term = this->row_term(dim),
                             .b_term = this->lane_term(dim)},
                            vectors_in_products(tile.index), seen_of(tile) * L::kPack, beside);
    };
    if (scores_few_rows()) {
      score_few_rows(tile.keys);
    } else {
      multiply_rows(this->keys, at.queries, scores_of(tile), dims.dim, beside_keys);
    }
    multiply_rows(this->values, at.douts, dweights_of(tile), dims.dim_v, beside_values);
  }
  int64 products_of(const Tile& tile) const {
    const int64 keys = divide_up(tile.keys.end - tile.keys.begin, L::kLanes);
    return keys * L::kVectors * kTermPairCount<L> *
           (divide_up(row_units(dims.dim), L::kLanes) +
            divide_up(row_units(dims.dim_v), L::kLanes));
  }

  // P and dS where they are not plain.
  void differentiate(const Tile& tile, bool may_hide) const {
    const GradientPanel<L>& panel = panels[tile.index];
    const ScoreTerms<L> terms(context, panel);
    GradientRows<L> rows = rows_of(tile);
    const PlainGradients<L> plain = gradients_of(tile);
    const ScoreGradients<L> gradients{.plain = plain,
                                      .terms = terms,
                                      .stage = stage,
                                      .scores = scores_of(tile),
                                      .dweights = dweights_of(tile),
                                      .first_key = tile.keys.begin,
                                      .may_hide = may_hide,
                                      .keeps_dscores = shared.dbias.given()};
    const int64 size = tile.keys.end - tile.keys.begin;
    for (int64 j = 0; j < size; j += GradientRows<L>::kStep) rows.store(j, size, gradients);
    rows.finish(size);
    if (shared.dbias.given()) {
      add_bias_gradient<L>(shared.dbias, context, panel, scores_of(tile), tile.keys);
    }
  }

  // S and dP of a tile. Where tile registers multiply, P and dS of the tile before are made next to
  // them; where vectors do, the chunk's first visitor waits for keys and values, which are
  // prefetched.
  void score_beside(const Tile& tile, const Tile& before, bool is_first_visit) const {
    if constexpr (kHasTiles<L>) {
      if (before.index >= 0) {
        GradientSteps<L> steps = steps_of(before, products_of(tile));
        score(tile, steps, steps);
        return steps.finish();
      }
    } else if (is_first_visit && tile.index == 0) {
      Ahead ahead_values = ahead_of(this->values, tile.chunk_row, dims.dim_v);
      Ahead ahead_keys =
          ahead_of(this->keys, tile.chunk_row + tile.keys.end - tile.keys.begin, dims.dim);
      return score(tile, ahead_values, ahead_keys);
    }
    Nothing nothing;
    score(tile, nothing, nothing);
  }

  // P and dS of each panel.
  void attend_panels(int count, int64 chunk_begin, Interval block, bool is_first_visit) const {
    constexpr bool kBeside = kHasTiles<L>;
    Tile before;
    int buffer = 0;
    for (int i = 0; i < count; ++i) {
      const Interval keys = panels[i].tile.keys;
      if (keys.empty()) continue;
      const Tile tile{i, count, keys, keys.begin - block.begin, keys.begin - chunk_begin, buffer};
      if (shared.dbias.given()) prefetch_keys(context, panels[i], shared.dbias, keys);
      score_beside(tile, before, is_first_visit);
      before = {};
      const bool may_hide = stage_block<L>(stage, context, panels[i]) < keys.end - keys.begin;
      if (!has_plain_gradients(p.features, may_hide)) {
        differentiate(tile, may_hide);
      } else if (kBeside) {
        before = tile;
        buffer = kTileBuffers - 1 - buffer;
      } else {
        steps_of(tile, 0).finish();
      }
      if (p.dq.given()) take_dscores(tile, chunk_begin);
    }
    if (kBeside && before.index >= 0) steps_of(before, 0).finish();
  }
  GradientSteps<L> steps_of(const Tile& tile, int64 products) const {
    return {gradients_of(tile), rows_of(tile), tile.keys.end - tile.keys.begin, products};
  }

  // A panel's part of dQ.
  void take_dscores(const Tile& tile, int64 chunk_begin) const {
    if constexpr (kHasTiles<L>) {
      this->keep_dscores(tile.index, tile.keys, chunk_begin);
    } else {
      const Unit* const rows =
          units_at(at.dscores) + of_key(tile.block_row, tile.index, tile.count);
      this->template multiply_dscores<Result::add>(
          tile.index, L::kPack > 1 ? dscore_pairs(tile.index, 0) : rows,
          L::kPack > 1 ? kWidth : block_units(tile.count), tile.chunk_row,
          tile.keys.end - tile.keys.begin,
          units(tiling.shape, tile.keys.end - tile.keys.begin) - seen_of(tile));
    }
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
    const Interval seen = panels[index].tile.keys;
    const auto clear = [&](int64 begin, int64 end) {
      for (int64 j = begin; j < end; ++j) {
        const int64 first = of_key(j - block.begin, index, count);
        for (int n = 0; n < kTerms<L>; ++n) {
          for (int64 u = first; u < first + kWidth / L::kPack; ++u) {
            units_at(at.weights)[n * this->tile_term() + u] = 0;
            units_at(at.dscores)[n * this->tile_term() + u] = 0;
          }
        }
      }
    };
    clear(keys.begin, seen.begin);
    clear(seen.end, keys.end);
  }

  // ---------------------------------------------------------------------------------- one task

  void visit_block(const RowBlocks& blocks, int64 block, const BackwardTask& task, Interval keys,
                   bool is_first_visit, uint8* nonfinite) const {
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
    if (nobody) {
      if (p.dq.given()) clear_dq(0, count), write_dq(count, nonfinite);
      return;
    }
    if (!kHasTiles<L> && p.dq.given()) clear_dq(0, count);
    for (int i = 0; i < count; ++i) panels[i].dscore_keys = {}, panels[i].has_dq = false;
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
      this->load_block(count, keys, this->shared_deltas(block));
      if (scores_few_rows()) with_few_rows([&](const auto& rows) { rows.begin(panels[0]); });
      each_block_until([&](Interval block_k) {
        return attend(count, keys.begin, key_blocks, block_k, is_first_visit), false;
      });
    }
    if (!p.dq.given()) return;
    for (int i = 0; i < count && kHasTiles<L>; ++i) {
      multiply_kept_dscores(i, keys.begin);
      if (!panels[i].has_dq) clear_dq(i, 1);
    }
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
      bool is_first_visit = true;
      for (int64 head = blocks.count() / step - 1; head >= 0; --head) {
        // The first chunk visits what nobody sees, too.
        const bool asks = task.reach && !blocks.packs_gqa && task.chunk > 0;
        const SpanReach reach = asks ? task.reach[head] : SpanReach{};
        const auto before = [&](int64 end) {
          return previous_rows(blocks, reach, task.chunk, keys, end);
        };
        for (int64 n = visited.end; (n = before(n)) >= visited.begin;) {
          visit_block(blocks, head * step + n, task, keys, is_first_visit, nonfinite);
          is_first_visit = false;
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
