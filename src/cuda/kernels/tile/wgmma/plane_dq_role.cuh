// The first warpgroup of a wgmma backward block of f32: it makes dq = dS K by three products of f16
// planes, which it adds to f32 sums in memory, in units of the rows' factors of dout; and it loads
// tiles, but for those that warpgroups of dv and of dk load themselves.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/hi_lo.cuh"
#include "cuda/kernels/tile/wgmma/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/plane_loads.cuh"

namespace regard {

template <KernelConfig kConfig>
struct PlaneDqRole {
  using Memory = BackwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  // So many tiles ahead bias and mask are loaded; where a warpgroup has dv and dk, all else as
  // well.
  static constexpr int kAhead = Memory::kWide ? 1 : 2;
  static constexpr int kAtOnce = 8;    // blocks of columns, whose sums are in registers
  static constexpr int kNoPanel = 16;  // a tile of one panel: no next one begins anywhere
  static constexpr int kKeyPlane = panels_of(kConfig.dim) * panel_bytes(kKeys) / 16;
  static constexpr int kDscorePlane = panel_bytes(kKeys) / 16;

  const KernelParams& params;
  const BackwardMaps& maps;
  Memory memory;
  DqTurns<kConfig> turns{params};
  int64 rows_of_head, first_row_of_sequence;  // of dq's sums

  // What the first tiles need, in the order in which they need it.
  REGARD_DEVICE void load_first(const BackwardTask& task, BackwardStep step) const {
    const PlaneLoads<kConfig> loads{params, maps, memory};
    loads.load_keys(task);
    loads.load_queries(task, step, 0);
    loads.load_values(task);
    loads.load_douts(task, step, 0);
#pragma unroll 1
    for (int use = 1; use < Memory::kStages && use < task.steps; ++use) {
      step.advance(task);
      loads.load_queries(task, step, use);
      loads.load_douts(task, step, use);
    }
  }

  // What dS^T of the halves of a tile's keys is to be multiplied by. The half with the smaller
  // factor is first: its sums are brought to the larger one before those of the other follow.
  struct Factors {
    int first_key = 0;
    float ratio = 1;  // at most
    float last;
  };
  REGARD_DEVICE Factors factors_of(int use) const {
    Factors x{.last = hi_lo_scale(largest_dscore<kConfig>(memory, use, 0)).factor};
    if constexpr (kKeys > kWarpgroupRows) {
      const float other = hi_lo_scale(largest_dscore<kConfig>(memory, use, kWarpgroupRows)).factor;
      x.first_key = uniform(other < x.last ? kWarpgroupRows : 0);
      const float least = other < x.last ? other : x.last;
      x.last = max_of(other, x.last);
      x.ratio = x.last == 0 ? 0.0f : least / x.last;
    }
    return x;
  }

  // Of the tile's 64 rows, kBlocks blocks of columns: over 64 keys.
  template <int kBlocks>
  REGARD_DEVICE void multiply(Accumulator (&sums)[kBlocks], int buffer, int first_block,
                              int first_key, bool adds) const {
    const uint32 a = descriptor_word(memory.dscores(buffer) + panel_bytes(first_key), kNoPanel);
    const uint32 b = descriptor_word(
        memory.keys() + first_block / 8 * panel_bytes(kKeys) + panel_bytes(first_key), kNoPanel);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < kPlaneTerms; ++term) {
#pragma unroll
      for (int k = 0; k < kWarpgroupRows / 16; ++k) {
        wgmma_ss_tn<F16>(
            sums, matrix_descriptor(a + plane_of_a(term) * kDscorePlane + k * panel_bytes(16) / 16),
            matrix_descriptor(b + plane_of_b(term) * kKeyPlane + k * panel_bytes(16) / 16),
            adds || term + k > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(sums);
  }
  template <int kBlocks>
  static REGARD_DEVICE void scale(Accumulator (&sums)[kBlocks], float factor) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= factor;
    }
  }

  template <int kBlocks>
  REGARD_DEVICE void add_to_memory(const Accumulator (&sums)[kBlocks], const BackwardTask& task,
                                   const BackwardStep& step, int first_block) const {
    if (step.tile * kRows + warp_index() * 16 >= task.seq.len_q) return;
    const int64 row = step.head * rows_of_head + first_row_of_sequence + step.tile * kRows;
    float* const to = params.buffers.dq_sums +
                      dq_offset(kConfig, row / 16 + warp_index(), first_block, lane_index(), 0);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) red_add_4(to + n * 128, sums[n]);
  }

  // A row far below others of the tile has lost what convert_dq then marks it for.
  REGARD_DEVICE void note_losses(const BackwardTask& task, const BackwardStep& step,
                                 float factor) const {
    const Problem& p = params.problem;
    if (lane_index() >= 16) return;
    const int row = warp_index() * 16 + lane_index();
    red_add(dq_losses(params) + step.head * hi_lo_term_rows(p) +
                PlaneLoads<kConfig>::first_row(p, task) + step.tile * kRows + row,
            factor);
  }

  template <int kBlocks>
  REGARD_DEVICE void make_part(const BackwardTask& task, const BackwardStep& step, int use,
                               int part, const Factors& factors) {
    constexpr int kParts = (kConfig.dim / 8 + kAtOnce - 1) / kAtOnce;
    Accumulator sums[kBlocks];
    multiply(sums, use & 1, part * kAtOnce, factors.first_key, false);
    if constexpr (kKeys > kWarpgroupRows) {
      scale(sums, factors.ratio);
      fence_operand(sums);
      multiply(sums, use & 1, part * kAtOnce, kWarpgroupRows - factors.first_key, true);
    }
    if (part == kParts - 1) free_dscores(use);
    if (kConfig.ordered_dq && part == 0) turns.take(task, step);
    if (part == 0) note_losses(task, step, factors.last);
    scale(sums, factors.last);
    add_to_memory(sums, task, step, part * kAtOnce);
  }
  REGARD_DEVICE void free_dscores(int use) const {
    mbarrier_arrive(memory.barrier(Memory::kDscoreEmpty, use & 1));
  }
  REGARD_DEVICE void make_dq(const BackwardTask& task, const BackwardStep& step, int use) {
    constexpr int kBlocks = kConfig.dim / 8, kWhole = kBlocks / kAtOnce, kRest = kBlocks % kAtOnce;
    const Factors factors = factors_of(use);
    sync_warp();  // every lane has read it
#pragma unroll 1
    for (int part = 0; part < kWhole; ++part) make_part<kAtOnce>(task, step, use, part, factors);
    if constexpr (kRest > 0) make_part<kRest>(task, step, use, kWhole, factors);
  }

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task(memory.task());
    if (task.steps == 0) return;
    rows_of_head = dq_rows(params.problem);
    first_row_of_sequence = first_dq_row(params.problem, task.seq.whole(), task.b);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    if (thread_index() == 0) load_first(task, step);
    sync_warp();
    const DqWarpgroup<kConfig> pair_terms{params, maps, memory};
    BackwardStep ahead = step;  // the tile that is loaded next
#pragma unroll 1
    for (int use = 0; use < kAhead; ++use) {
      if constexpr (kHasPairTerms<kConfig>) {
        if (use < task.steps) {
          pair_terms.load_pair_terms(task, ahead, use);
          pair_terms.hand_over_pair_terms(use);
        }
      }
      ahead.advance(task);
    }
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    const int steps = task.steps;
#pragma unroll 1
    for (int use = 0; use < steps; ++use) {
      make_opaque(memory.begin);
      const bool loads = use + kAhead < steps;
      if constexpr (Memory::kWide && kHasPairTerms<kConfig>) {
        // The weights have been made: the one place of bias and mask is free.
        mbarrier_wait(memory.barrier(Memory::kWeightsFull, use & 1), parity_of(use));
        if (loads) pair_terms.load_pair_terms(task, ahead, use + kAhead);
      }
      mbarrier_wait(memory.barrier(Memory::kDscoreFull, use & 1), parity_of(use));
      if constexpr (!Memory::kWide) {
        // dS^T is there: nobody needs this tile's dO, and Q of the one before, any more.
        if (thread_index() == 0 && loads) {
          const PlaneLoads<kConfig> later{params, maps, memory};
          later.load_queries(task, ahead, (use + kAhead) % Memory::kQueryStages);
          later.load_douts(task, ahead, use & 1);
        }
        sync_warp();
        if constexpr (kHasPairTerms<kConfig>) {
          if (loads) pair_terms.load_pair_terms(task, ahead, use + kAhead);
        }
      }
      if constexpr (kConfig.wanted.dq) {
        make_dq(task, step, use);
      } else {
        free_dscores(use);
      }
      if constexpr (kHasPairTerms<kConfig>) {
        if (loads) pair_terms.hand_over_pair_terms(use + kAhead);
      }
      step.advance(task);
      ahead.advance(task);
    }
    if constexpr (kConfig.ordered_dq) turns.finish();
  }
};

}  // namespace regard
