// Forward: one task has a block of query rows and loops over the keys that they see.
//
// The lanes of a vector are query rows, so that the softmax needs no sums across lanes, and keys
// and values are read in their natural order, one broadcast element at a time:
//   S^T [keys][panel] = K Q^T     P^T = e^(S^T - max)     O^T [dim_v][panel] += V^T P^T
#pragma once

#include "cpu/kernels/multiply.hpp"
#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

// A panel's running result.
template <class L>
struct Running {
  using Real = typename L::Real;
  Real* out;  // [dim_v][panel]
  Real* max;  // [panel]
  Real* sum;  // [panel]

  REGARD_INLINE Running(char* memory, const PartialLayout& at)
      : out(reinterpret_cast<Real*>(memory + at.out)),
        max(reinterpret_cast<Real*>(memory + at.max)),
        sum(reinterpret_cast<Real*>(memory + at.sum)) {}

  REGARD_INLINE SoftmaxRow<L> row(int v) const {
    return {L::load(max + v * L::kLanes), L::load(sum + v * L::kLanes)};
  }
  REGARD_INLINE void set_row(int v, const SoftmaxRow<L>& row) const {
    L::store(max + v * L::kLanes, row.max);
    L::store(sum + v * L::kLanes, row.sum);
  }
};

template <class L>
struct ForwardKernel {
  static_assert(sizeof(Panel) <= kPanelBytes);
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  using Unit = typename L::Unit;
  static constexpr int kWidth = L::kLanes * L::kVectors;

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
        exponent(Real(double(unit) * kLog2E)) {}

  Unit* units_at(int64 offset) const { return reinterpret_cast<Unit*>(scratch + offset); }
  Real* reals_at(int64 offset) const { return reinterpret_cast<Real*>(scratch + offset); }
  Unit* queries(int panel) const {
    return units_at(at.queries) + panel * padded_units(tiling.shape, dims.dim) * kWidth;
  }
  AcrossRows<L> values() const {
    return {units_at(at.values), tiling.shape, dims.dim_v, tiling.block_k};
  }
  Running<L> running(char* memory, int panel) const {
    return {memory + panel * partial_at.size, partial_at};
  }

  // The running state before the first key. A sink counts once, in the first chunk of keys.
  void begin_rows(const Running<L>& run, const Panel& panel, bool with_sink) const {
    const int vectors = vectors_of<L>(panel);
    for (int v = 0; v < vectors; ++v) {
      Real* const out = run.out + v * L::kLanes;
      for (int64 d = 0; d < dims.dim_v; ++d) L::store(out + d * kWidth, L::set(0));
      run.set_row(v, empty_softmax<L>());
    }
    if (!p.features.sink || !with_sink) return;
    for (int lane = 0; lane < panel.rows; ++lane) {
      const float sink = sink_of(panel, lane);
      if (sink == -__builtin_huge_valf()) continue;
      run.max[lane] = value_of_sink(sink, unit);
      run.sum[lane] = sink - sink == 0 ? Real(1) : Real(__builtin_nan(""));
    }
  }

  float sink_of(const Panel& panel, int lane) const {
    return static_cast<const float*>(p.sink.data)[panel.head[lane] * p.sink.strides.head];
  }

  // Logits of the block, hidden ones -inf, and their maximum per lane.
  void finish_scores(const ScoreTerms<L>& terms, int vectors, Interval keys, bool may_hide,
                     Vec* block_max) const {
    const int64 count = keys.end - keys.begin;
    Real* const scores = reals_at(at.scores);
    const bool plain = is_plain(terms.on);
    const Vec lowest = L::set(-Real(__builtin_huge_val()));
    for (int v = 0; v < vectors; ++v) {
      Vec max = lowest;
      Real* const column = scores + v * L::kLanes;
      if (plain && !may_hide) {
        for (int64 j = 0; j < count; ++j) max = L::max(max, L::load(column + j * kWidth));
      } else {
        for (int64 j = 0; j < count; ++j) {
          Vec s = L::load(column + j * kWidth);
          if (!plain) {
            const Vec bias =
                terms.on.bias ? L::load(stage.bias + j * kWidth + v * L::kLanes) : L::set(0);
            s = terms.value(s, bias, v, keys.begin + j);
          }
          if (may_hide) {
            s = L::select(L::mask_of(stage.visible[j] >> (v * L::kLanes)), s, lowest);
          }
          L::store(column + j * kWidth, s);
          max = L::max(max, s);
        }
      }
      block_max[v] = max;
    }
  }

  // P^T = 2^((S^T - max) exponent), rounded to Units, and their sums.
  void exponentiate(const Running<L>& run, const ScoreTerms<L>& terms, int vectors,
                    int64 count) const {
    const Real* const scores = reals_at(at.scores);
    Unit* const weights = units_at(at.weights);
    const bool dropout = terms.on.dropout;
    for (int v = 0; v < vectors; ++v) {
      SoftmaxRow<L> row = run.row(v);
      const Vec base = subtractable<L>(row.max), factor = L::set(exponent);
      Vec sum = L::set(0);
      const auto weight_of_key = [&](int64 j) {
        const Vec s = L::load(scores + j * kWidth + v * L::kLanes);
        const Vec weight = weight_of<L>(s, base, factor);
        sum = L::add(sum, weight);
        if (!dropout) return weight;
        return L::select(L::mask_of(stage.kept[j] >> (v * L::kLanes)), weight, L::set(0));
      };
      if constexpr (L::kPack == 1) {
        for (int64 j = 0; j < count; ++j) {
          L::store(weights + j * kWidth + v * L::kLanes, weight_of_key(j));
        }
      } else {
        for (int64 j = 0; j < count; j += 2) {
          const Vec even = weight_of_key(j);
          const Vec odd = j + 1 < count ? weight_of_key(j + 1) : L::set(0);
          L::store_rounded_pairs(weights + j / 2 * kWidth + v * L::kLanes, even, odd);
        }
        clear_last_tile<L>(weights + v * L::kLanes, kWidth, count);
      }
      row.sum = L::add(row.sum, sum);
      run.set_row(v, row);
    }
  }

  void shrink_out(const Running<L>& run, int vectors, const Vec* shrink) const {
    bool unchanged = true;
    for (int v = 0; v < vectors; ++v) {
      const uint64 same = L::bits_of(L::equal(shrink[v], L::set(1)));
      unchanged = unchanged && same == (uint64(1) << L::kLanes) - 1;
    }
    if (unchanged) return;
    for (int64 d = 0; d < dims.dim_v; ++d) {
      for (int v = 0; v < vectors; ++v) {
        Real* const out = run.out + d * kWidth + v * L::kLanes;
        L::store(out, L::mul(L::load(out), shrink[v]));
      }
    }
  }

  // One panel and the keys of a packed block that it sees.
  void attend(int index, const Running<L>& run, Interval block) const {
    const Panel& panel = panels[index];
    const Interval keys = panel.tile.keys;
    if (keys.empty()) return;
    const int64 count = keys.end - keys.begin, from = keys.begin - block.begin;
    const CpuShape& shape = tiling.shape;
    const int64 key_units = padded_units(shape, dims.dim);
    const int vectors = vectors_of<L>(panel);
    multiply_wide<L, Walk::rows, Result::replace>({.a = units_at(at.keys) + from * key_units,
                                                   .lda = key_units,
                                                   .b = queries(index),
                                                   .ldb = kWidth,
                                                   .c = reals_at(at.scores),
                                                   .ldc = kWidth,
                                                   .m = count,
                                                   .k = units(shape, dims.dim)},
                                                  vectors);
    const ScoreTerms<L> terms(context, panel);
    const bool may_hide = stage_block<L>(stage, context, panel);
    Vec block_max[L::kVectors], shrink[L::kVectors];
    finish_scores(terms, vectors, keys, may_hide, block_max);
    for (int v = 0; v < vectors; ++v) {
      SoftmaxRow<L> row = run.row(v);
      shrink[v] = raise_max<L>(row, block_max[v], L::set(exponent));
      run.set_row(v, row);
    }
    shrink_out(run, vectors, shrink);
    exponentiate(run, terms, vectors, count);
    multiply_wide<L, AcrossRows<L>::kWalk, Result::add>({.a = values().from(from),
                                                         .lda = values().stride,
                                                         .b = units_at(at.weights),
                                                         .ldb = kWidth,
                                                         .c = run.out,
                                                         .ldc = kWidth,
                                                         .m = dims.dim_v,
                                                         .k = units(shape, count)},
                                                        vectors);
  }

  // Merges rows into what out and lse hold: makes `held` the factors of out, and `factor` and `lse`
  // those of the merged rows. Returns the lanes that saw no key and leave theirs as they are.
  uint64 continue_rows(const Panel& panel, Real* held, Real* factor, Real* lse) const {
    Real given[kWidth] = {};
    uint64 unchanged = 0;
    for (int lane = 0; lane < panel.rows; ++lane) {
      given[lane] = static_cast<const Real*>(p.lse.data)[context.offset_q(p.lse, panel, lane)];
      unchanged |= uint64(leaves_as_given(given[lane], lse[lane])) << lane;
    }
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      const int at = v * L::kLanes;
      const auto merged = continuation<L>(L::load(given + at), L::load(lse + at));
      L::store(held + at, merged.given);
      L::store(factor + at, L::mul(L::load(factor + at), merged.own));
      L::store(lse + at, merged.lse);
    }
    return unchanged;
  }

  void finish_rows(const Running<L>& run, const Panel& panel, uint8* nonfinite) const {
    Real factor[kWidth], lse[kWidth];
    const Real keep = Real(keep_scale(p.dropout));
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      SoftmaxRow<L> row = run.row(v);
      L::store(factor + v * L::kLanes, L::mul(normaliser<L>(row), L::set(keep)));
      // Lanes that are not in use have no sum, whose logarithm would be slow.
      const uint64 used = ((uint64(1) << panel.rows) - 1) >> (v * L::kLanes);
      row.sum = L::select(L::mask_of(used), row.sum, L::set(1));
      L::store(lse + v * L::kLanes, lse_of<L>(row, L::set(unit)));
    }
    for (int lane = 0; p.features.sink && lane < panel.rows; ++lane) {
      // If no key joined the sink, the lse is the sink, to the last bit.
      const float sink = sink_of(panel, lane);
      if (run.sum[lane] == 1 && run.max[lane] == value_of_sink(sink, unit)) lse[lane] = sink;
    }
    const uint64 bad = nonfinite ? nonfinite_lanes<L>(run.out, panel, dims.dim_v) : 0;
    uint64 flagged = 0;
    for (int lane = 0; nonfinite && lane < panel.rows; ++lane) {
      // A NaN lse comes from the row's own pairs; NaN from hidden places does not reach it.
      const bool flag = (bad >> lane & 1) && lse[lane] == lse[lane];
      nonfinite[panel.first + lane] = flag;
      flagged |= uint64(flag) << lane;
    }
    Real held[kWidth];
    // The fix-up pass merges flagged rows into what out and lse hold.
    const uint64 skip = p.continues ? continue_rows(panel, held, factor, lse) | flagged : 0;
    store_lanes<L>(run.out, factor, context, panel, p.out, dims.dim_v, p.continues ? held : nullptr,
                   skip);
    for (int lane = 0; p.lse.given() && lane < panel.rows; ++lane) {
      if (skip >> lane & 1) continue;
      const int64 offset = context.offset_q(p.lse, panel, lane);
      L::store_as(p.lse.type, p.lse.data, offset, 1, L::set(lse[lane]));
    }
  }

  void run_task(const ForwardTask& task, uint8* nonfinite) const {
    const RowBlocks blocks(tiling, context.seq.len_q, p.sizes.group());
    const int count =
        make_panels<L>(panels, context, blocks.first_row(task.block), blocks.rows(task.block));
    char* const memory = task.partial ? static_cast<char*>(task.partial) : scratch + at.partial;
    for (int i = 0; i < count; ++i) {
      pack_lanes<L>(queries(i), context, panels[i], p.q, dims.dim, vectors_of<L>(panels[i]));
      begin_rows(running(memory, i), panels[i], task.keys.begin == 0);
    }
    const Interval visible = visible_of(panels, count);
    const Interval keys{larger(visible.begin, task.keys.begin),
                        smaller(visible.end, task.keys.end)};
    const CpuShape& shape = tiling.shape;
    for (int64 j = keys.begin; j < keys.end; j = (j / tiling.block_k + 1) * tiling.block_k) {
      const Interval block{j, smaller(keys.end, (j / tiling.block_k + 1) * tiling.block_k)};
      if (!set_tiles<L>(panels, count, context, {keys, tiling.block_k}, block)) continue;
      const int64 size = block.end - block.begin;
      pack_rows<L>(units_at(at.keys), padded_units(shape, dims.dim), context, p.k, dims.dim, j,
                   size);
      values().pack(p.v, dims.dim_v, size,
                    [&](int64 row) { return context.offset_k(p.v, j + row); });
      for (int i = 0; i < count; ++i) attend(i, running(memory, i), block);
    }
    if (task.partial) return;
    for (int i = 0; i < count; ++i) finish_rows(running(memory, i), panels[i], nonfinite);
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
          SoftmaxRow<L> row = whole.row(v);
          const MergeFactors<L> factors = merge<L>(row, part.row(v), L::set(exponent));
          whole.set_row(v, row);
          for (int64 d = 0; d < dims.dim_v; ++d) {
            const int64 offset = d * kWidth + v * L::kLanes;
            const Vec other = L::mul(L::load(part.out + offset), factors.second);
            L::store(whole.out + offset, L::fma(L::load(whole.out + offset), factors.first, other));
          }
        }
      }
      finish_rows(whole, panels[i], nonfinite);
    }
  }
};

template <class L>
void run_forward(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                 uint8* nonfinite, char* scratch) {
  [[maybe_unused]] const TileSession<L> session;
  ForwardKernel<L>(problem, tiling, task.b, task.kv, scratch).run_task(task, nonfinite);
}

template <class L>
void run_combine(const Problem& problem, const CpuTiling& tiling, const CombineTask& task,
                 uint8* nonfinite, char* scratch) {
  ForwardKernel<L>(problem, tiling, task.b, task.kv, scratch).run_combine(task, nonfinite);
}

}  // namespace
}  // namespace regard
