// Forward: one task has a block of query rows and loops over the keys that they see.
//
// The lanes of a vector are query rows, so that the softmax needs no sums across lanes, and keys
// and values are read in their natural order, one broadcast element at a time:
//   S^T [keys][panel] = K Q^T     P^T = e^(S^T - max)     O^T [dim_v][panel] += V^T P^T
#pragma once

#include "cpu/kernels/exponentials.hpp"
#include "cpu/kernels/few_rows.hpp"
#include "cpu/kernels/packed_range.hpp"
#include "cpu/kernels/running_rows.hpp"
#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class L>
struct ForwardKernel {
  static_assert(sizeof(Panel) <= kPanelBytes);
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;
  static constexpr int kBuffers = kHasTiles<L> ? kTileBuffers : 1;
  // The largest sum of a row's weights in a tile whose scores were not compared with the maxima.
  static constexpr Real kMostUncompared = Real(1 << 15);

  // A panel and the keys of a block that it sees, on their way from scores to a part of out.
  struct Step {
    int panel = -1;
    int64 count = 0;          // keys; none: there is no such step, and its products are empty
    bool compared = true;     // whether no score exceeds its row's maximum by more than the slack
    bool begins_out = false;  // the panel's first step
    Product<L> scores{};
    Product<L> out{};
  };

  const Problem& p;
  const CpuTiling& tiling;
  const HeadContext context;
  const HeadSizes dims;
  const ForwardScratch at;
  const PartialLayout partial_at;
  char* const scratch;
  const Stage<Real> stage;
  Panel* const panels;
  const Real unit;      // of every logit
  const Real exponent;  // unit * log2(e)
  const Real slack;     // how far a value may exceed its row's maximum
  const RunningRows<L> running_rows;

  ForwardKernel(const Problem& problem, const CpuTiling& cpu_tiling, int64 b, int64 kv,
                char* memory)
      : p(problem),
        tiling(cpu_tiling),
        context{problem, b, kv, sequence(problem.sequences, b)},
        dims{p.sizes.dim, p.sizes.dim_v},
        at(forward_scratch(tiling, dims)),
        partial_at(partial_layout(tiling, dims)),
        scratch(memory),
        stage(scratch, at.stage),
        panels(reinterpret_cast<Panel*>(scratch + at.panels)),
        unit(logit_unit(p.features, score_params<L>(p))),
        exponent(Real(double(unit) * kLog2E)),
        slack(slack_for(exponent)),
        running_rows{p, context, dims, unit} {}

  // Weights of up to 2^8 cost no accuracy, and a maximum that stays costs no pass over out.
  static Real slack_for(Real exponent) {
    const Real limit = Real(__builtin_huge_val()), most = 8 / exponent;
    return !(exponent > 0) ? 0 : most < limit ? most : Real(0x1p126);
  }

  Unit* units_at(int64 offset) const { return reinterpret_cast<Unit*>(scratch + offset); }
  Real* reals_at(int64 offset) const { return reinterpret_cast<Real*>(scratch + offset); }
  int64 query_term() const { return padded_units(tiling.shape, dims.dim) * kWidth; }
  Unit* queries(int panel) const { return units_at(at.queries) + panel * kTerms<L> * query_term(); }
  Running<L> running(char* memory, int panel) const {
    return {memory + panel * partial_at.size, partial_at};
  }

  // Logits of the tile, hidden ones -inf, and their maximum per lane. Every row sees the first
  // `open` keys.
  void finish_scores(const ScoreTerms<L>& terms, Real* scores, int vectors, Interval keys,
                     int64 open, Vec* block_max) const {
    const int64 count = keys.end - keys.begin;
    const bool plain = is_plain(terms.on);
    const Vec lowest = L::set(-Real(__builtin_huge_val()));
    for (int v = 0; v < vectors; ++v) {
      Real* const column = scores + v * L::kLanes;
      const int64 done = plain ? open : 0;
      Vec max = column_max(column, done);
      for (int64 j = done; j < count; ++j) {
        Vec s = L::load(column + j * kWidth);
        if (!plain) {
          const Vec bias =
              terms.on.bias ? L::load(stage.bias + j * kWidth + v * L::kLanes) : L::set(0);
          s = terms.value(s, bias, v, keys.begin + j);
        }
        if (j >= open) {
          s = L::select(L::mask_of(stage.visible[j] >> (v * L::kLanes)), s, lowest);
        }
        L::store(column + j * kWidth, s);
        max = L::max(max, s);
      }
      block_max[v] = max;
    }
  }

  // Four maxima at once, because each waits for the one before it.
  Vec column_max(const Real* column, int64 count) const {
    Vec max[4];
#pragma GCC unroll 4
    for (Vec& x : max) x = L::set(-Real(__builtin_huge_val()));
    int64 j = 0;
    for (; j + 4 <= count; j += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) max[i] = L::max(max[i], L::load(column + (j + i) * kWidth));
    }
    for (; j < count; ++j) max[0] = L::max(max[0], L::load(column + j * kWidth));
    return L::max(L::max(max[0], max[1]), L::max(max[2], max[3]));
  }

  // Whether each row has a maximum of some score, or of its sink.
  bool have_maxima(const Running<L>& run, int vectors) const {
    uint64 none = 0;
    for (int v = 0; v < vectors; ++v) {
      none |= L::bits_of(L::equal(run.row(v).max, L::set(-Real(__builtin_huge_val()))));
    }
    return none == 0;
  }

  // Where a value exceeds a maximum by more than the slack, the maxima rise, after `pending` was
  // added under the old ones.
  void raise_maxima(const Step& step, Step& pending, const Running<L>& run,
                    const Vec* block_max) const {
    const int vectors = vectors_of<L>(panels[step.panel]);
    uint64 rising = 0;
    for (int v = 0; v < vectors; ++v) {
      const Vec limit = L::add(run.row(v).max, L::set(slack));
      rising |= L::bits_of(L::less(limit, block_max[v]));
    }
    if (rising == 0) return;
    if (pending.panel == step.panel && pending.count > 0) {
      multiply_values(pending);
      pending.count = 0;
    }
    Vec shrink[L::kVectors];
    bool was_empty = true;
    for (int v = 0; v < vectors; ++v) {
      SoftmaxRow<L> row = run.row(v);
      const uint64 empty = L::bits_of(L::equal(row.max, L::set(-Real(__builtin_huge_val()))));
      was_empty = was_empty && empty == (uint64(1) << L::kLanes) - 1;
      shrink[v] = raise_max<L>(row, block_max[v], L::set(exponent));
      run.set_row(v, row);
    }
    if (!was_empty && !step.begins_out) shrink_out(run, vectors, shrink);
  }

  void shrink_out(const Running<L>& run, int vectors, const Vec* shrink) const {
    for (int64 d = 0; d < dims.dim_v; ++d) {
      for (int v = 0; v < vectors; ++v) {
        Real* const out = run.out + d * kWidth + v * L::kLanes;
        L::store(out, L::mul(L::load(out), shrink[v]));
      }
    }
  }

  // ---------------------------------------------------------------------------------- steps

  // `tile` is the memory of the scores and of the weights that take their place.
  Step step_of(int index, const Running<L>& run, const typename PackedRange<L>::Block& keys,
               int64 from, Real* tile) const {
    const CpuShape& shape = tiling.shape;
    Panel& panel = panels[index];
    const Interval seen = panel.tile.keys;
    const bool begins_out = !panel.has_out;
    panel.has_out = true;
    const int64 count = seen.end - seen.begin;
    return {.panel = index,
            .count = count,
            .begins_out = begins_out,
            .scores = {.a = keys.keys.at + from * keys.keys.stride,
                       .lda = keys.keys.stride,
                       .b = queries(index),
                       .ldb = kWidth,
                       .c = tile,
                       .ldc = kWidth,
                       .m = count,
                       .k = units(shape, dims.dim),
                       .a_in_tiles = keys.keys_in_tiles,
                       .a_term = keys.key_term,
                       .b_term = query_term()},
            .out = {.a = keys.values.from(from),
                    .lda = keys.values.stride,
                    .b = reinterpret_cast<const Unit*>(tile),
                    .ldb = kTerms<L> * kWidth,
                    .c = run.out,
                    .ldc = kWidth,
                    .m = dims.dim_v,
                    .k = units(shape, count),
                    .a_in_tiles = AcrossRows<L>::kInTiles,
                    .a_term = keys.value_term,
                    .b_term = kWidth,
                    .skipped_pairs = kTerms<L> - 1}};
  }

  template <class Beside>
  void multiply_keys(const Step& step, Beside& beside) const {
    const int vectors = vectors_of<L>(panels[step.panel]);
    multiply_wide<L, Walk::rows, Result::replace>(step.scores, vectors, beside);
  }
  template <class Beside = Nothing>
  void multiply_values(const Step& step, Beside&& beside = Nothing()) const {
    constexpr Walk kWalk = AcrossRows<L>::kWalk;
    const int vectors = vectors_of<L>(panels[step.panel]);
    if (step.begins_out) {
      multiply_wide<L, kWalk, Result::replace>(step.out, vectors, beside);
    } else {
      multiply_wide<L, kWalk, Result::add>(step.out, vectors, beside);
    }
  }

  // From raw products to values, and the maxima that weights are relative to. Where tile registers
  // multiply, raw products that are values already, and rows that have maxima, need neither: sums
  // of weights will tell where a maximum is too small.
  void settle(Step& step, Step& pending, const Running<L>& run) const {
    const Panel& panel = panels[step.panel];
    const ScoreTerms<L> terms(context, panel);
    const int64 open = stage_block<L>(stage, context, panel);
    const int vectors = vectors_of<L>(panel);
    step.compared = !kHasTiles<L> || open < step.count || !is_plain(terms.on) ||
                    !(slack > 0 && have_maxima(run, vectors));
    if (!step.compared) return;
    Vec block_max[L::kVectors];
    finish_scores(terms, step.scores.c, vectors, panel.tile.keys, open, block_max);
    raise_maxima(step, pending, run, block_max);
  }

  // Scores once more, and maxima that they are compared with.
  void settle_again(Step& step, const Running<L>& run) const {
    Step none;
    Nothing nothing;
    const int vectors = vectors_of<L>(panels[step.panel]);
    multiply_keys(step, nothing);
    Vec block_max[L::kVectors];
    for (int v = 0; v < vectors; ++v) {
      block_max[v] = column_max(step.scores.c + v * L::kLanes, step.count);
    }
    raise_maxima(step, none, run, block_max);
    step.compared = true;
  }

  ScoreTile<L> score_tile(const Step& step, const Running<L>& run) const {
    return {.scores = step.scores.c,
            .keys = step.count,
            .vectors = vectors_of<L>(panels[step.panel]),
            .exponent = exponent,
            .most = step.compared ? Real(__builtin_huge_val()) : kMostUncompared,
            .max = run.max,
            .sum = run.sum,
            .kept = p.features.dropout ? stage.kept : nullptr};
  }

  // From values to weights.
  void weigh(const Step& step, const Running<L>& run) const {
    const ScoreTile<L> tile = score_tile(step, run);
    with_exponentials(tile, 0, [&](auto exponentials) { exponentials.finish(tile); });
  }

  // One step after the other. The rows of the first vector may not see the step's last keys.
  template <class Beside>
  void attend(Step step, const Running<L>& run, Beside beside_keys, Beside beside_values) const {
    const int vectors = vectors_of<L>(panels[step.panel]);
    const int64 seen = divide_up(keys_of_first_vector<L>(panels[step.panel]), L::kPack);
    multiply_long_rows<L>(step.scores, vectors, seen * L::kPack, beside_keys);
    Step none;
    settle(step, none, run);
    weigh(step, run);
    step.out.late = step.out.k - seen;
    multiply_values(step, beside_values);
  }

  // The tile products of the steps before and after, and between them the exponentials of `now`;
  // after them with dropout, because there are no registers for what it keeps.
  void advance(const Step& before, Step& now, Step& next, char* memory) const {
    const bool beside = now.count > 0 && !p.features.dropout;
    Nothing nothing;
    if (!beside) multiply_neighbours(before, next, nothing);
    if (now.count > 0) {
      const Running<L> run = running(memory, now.panel);
      const ScoreTile<L> tile = score_tile(now, run);
      const int64 products = tile_products(before.out) + tile_products(next.scores);
      bool done = false;
      with_exponentials(tile, products, [&](auto exponentials) {
        if (beside) multiply_neighbours(before, next, exponentials);
        done = exponentials.finish(tile);
      });
      if (!done) {
        settle_again(now, run);
        weigh(now, run);
      }
    }
    if (next.count > 0) settle(next, now, running(memory, next.panel));
  }
  // Scores of `next` take the place of weights of `before`.
  template <class Beside>
  void multiply_neighbours(const Step& before, const Step& next, Beside& beside) const {
    if (before.count > 0) multiply_values(before, beside);
    if (next.count > 0) multiply_keys(next, beside);
  }

  // All panels and a range of blocks that fits the packed memory.
  void attend_range(int count, const KeyBlocks& blocks, Interval range, char* memory) const {
    PackedRange<L> packed(context, tiling, dims, units_at(at.keys), units_at(at.values),
                          range.begin);
    Step steps[3], none;  // the last three of those that are numbered by turns
    const auto step = [&](int64 n) -> Step& { return steps[(n + 3) % 3]; };
    int64 turn = 0;
    for (int i = 0; i < count; ++i) {
      for (int64 n = range.begin; (n = next_block(panels + i, 1, blocks, n)) < range.end; ++n) {
        const Interval block = blocks.at(n);
        if (!set_tile<L>(panels[i], context, blocks, block)) continue;
        Real* const tile = reals_at(at.tiles) + turn % kBuffers * tiling.block_k * kWidth;
        Step& next = step(turn);
        next = step_of(i, running(memory, i), packed[block],
                       panels[i].tile.keys.begin - block.begin, tile);
        if constexpr (kHasTiles<L>) {
          advance(step(turn - 2), step(turn - 1), next, memory);
        } else if (i == 0) {
          attend(next, running(memory, i), packed.beside_keys(block), packed.beside_values(block));
        } else {
          attend(next, running(memory, i), Nothing(), Nothing());
        }
        ++turn;
      }
    }
    if constexpr (kHasTiles<L>) {
      advance(step(turn - 2), step(turn - 1), none, memory);
      advance(step(turn - 1), none, none, memory);
    }
  }

  void attend_panels(int count, const KeyBlocks& blocks, char* memory) const {
    const auto ahead = [&](const Panel& panel) __attribute__((always_inline)) {
      prefetch_panel<3>(context, panel, p.q, dims.dim);
    };
    each_panel_ahead<L>(panels, 0, count, ahead, [&](int i) {
      each_term<L>([&]<class Term>(int n) {
        pack_lanes<Term>(queries(i) + n * query_term(), context, panels[i], p.q, dims.dim,
                         vectors_of<L>(panels[i]));
      });
    });
    const int64 packed = tiling.pack_k / tiling.block_k, end = blocks.end();
    const int64 most = count > 1 ? packed : smaller<int64>(packed, 4);
    Interval range{0, blocks.of(blocks.keys.begin)};
    while ((range.begin = next_block(panels, count, blocks, range.end)) < end) {
      range.end = smaller(end, round_up(range.begin + 1, most));
      attend_range(count, blocks, range, memory);
    }
  }

  // The only panel of a sequence of few rows, and a range of keys.
  template <int kRows>
  void attend_few_rows(Interval range, const Running<L>& run) const {
    if constexpr (2 * kRows <= kMostFewRows<L>) {
      if (kRows < panels[0].rows) return attend_few_rows<2 * kRows>(range, run);
    }
    Panel& panel = panels[0];
    const KeyBlocks blocks{range, kFewRowsKeys};
    const FewRows<L, kRows> rows(context, dims, scratch, at.few);
    FewSoftmax<L, kRows> softmax(context, stage, panel, exponent, slack, run.max, run.sum);
    Real* const scores = reals_at(at.few.scores);
    Real shrink[L::kLanes];
    const auto end_tile = [&] {
      rows.end_tile();
      softmax.end_tile();
    };
    rows.begin(panel);
    int64 tile = -1;
    for (int64 n = blocks.of(range.begin); (n = next_block(panels, 1, blocks, n)) < blocks.end();
         ++n) {
      if (n / kFewRowsBlocks != tile) end_tile();
      tile = n / kFewRowsBlocks;
      if (!set_tile<L>(panel, context, blocks, blocks.at(n))) continue;
      rows.multiply_keys(panel.tile.keys, scores);
      if (softmax.settle(panel, scores, shrink)) rows.shrink(shrink);
      softmax.weigh(panel, scores);
      rows.multiply_values(panel.tile.keys, scores);
    }
    end_tile();
    rows.end(run.out);
    panel.has_out = true;
    softmax.end(run.max, run.sum, panel.rows);
  }

  // Leaves the running results of the task's panels in their memory; returns how many they are.
  int attend_task(const ForwardTask& task) const {
    const RowBlocks blocks(tiling, context.seq.len_q, p.sizes.group());
    const int count =
        make_panels<L>(panels, context, blocks.first_row(task.block), blocks.rows(task.block));
    char* const memory = memory_of(task);
    for (int i = 0; i < count; ++i) {
      running_rows.begin(running(memory, i), panels[i], task.keys.begin == 0);
    }
    const Interval keys = intersection(seen_by(panels, count), task.keys);
    if (!has_few_rows(tiling.shape, context.seq.len_q, p.sizes.group())) {
      const SpanReach reach = context.reach_of(task.reach, panels[0]);
      attend_panels(count, {keys, tiling.block_k, reach.rows_of_keys}, memory);
    } else if constexpr (kMostFewRows<L> > 0) {
      if (!keys.empty()) attend_few_rows<1>(keys, running(memory, 0));
    }
    for (int i = 0; i < count; ++i) {
      if (!panels[i].has_out) running_rows.clear_out(running(memory, i), panels[i]);
    }
    return count;
  }
  char* memory_of(const ForwardTask& task) const {
    return task.partial ? static_cast<char*>(task.partial) : scratch + at.partial;
  }

  // Writes the results of some panels, unless they are to be merged first.
  void finish_panels(const ForwardTask& task, int first, int end, uint8* nonfinite) const {
    if (task.partial) return;
    const auto ahead = [&](const Panel& panel) __attribute__((always_inline)) {
      prefetch_panel<3, true>(context, panel, p.out, dims.dim_v);
    };
    each_panel_ahead<L>(panels, first, end, ahead, [&](int i) {
      running_rows.finish(running(memory_of(task), i), panels[i], nonfinite);
    });
  }

  // Whether the running results of some panels are.
  bool are_finite(const ForwardTask& task, int first, int end) const {
    for (int i = first; i < end; ++i) {
      if (!running_rows.are_finite(running(memory_of(task), i), panels[i])) return false;
    }
    return true;
  }

  // Merges the chunks of a block into the first chunk's memory, and finishes the block.
  void run_combine(const CombineTask& task, uint8* nonfinite) const {
    const RowBlocks blocks(tiling, context.seq.len_q, p.sizes.group());
    const int count =
        make_panels<L>(panels, context, blocks.first_row(task.block), blocks.rows(task.block));
    char* const memory = static_cast<char*>(task.partial);
    for (int i = 0; i < count; ++i) {
      const Running<L> whole = running(memory, i);
      for (int64 chunk = 1; chunk < task.chunks; ++chunk) {
        const Running<L> part = running(memory + chunk * task.partial_stride, i);
        for (int v = 0; v < vectors_of<L>(panels[i]); ++v) {
          whole.add(part, v, dims.dim_v, exponent);
        }
      }
      running_rows.finish(whole, panels[i], nonfinite);
    }
  }
};

template <class L>
void run_forward(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                 uint8* nonfinite, char* scratch) {
  [[maybe_unused]] const TileSession<L> session;
  const ForwardKernel<L> kernel(problem, tiling, task.b, task.kv, scratch);
  kernel.finish_panels(task, 0, kernel.attend_task(task), nonfinite);
}

template <class L>
void run_combine(const Problem& problem, const CpuTiling& tiling, const CombineTask& task,
                 uint8* nonfinite, char* scratch) {
  ForwardKernel<L>(problem, tiling, task.b, task.kv, scratch).run_combine(task, nonfinite);
}

}  // namespace
}  // namespace regard
