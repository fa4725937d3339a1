// The first warpgroup of a wgmma backward block: it makes dq = dS K, which it adds to f32 sums in
// memory, and one of its threads fills shared memory through the copy engine; all of them copy bias
// and mask.
//
// That dS^T of a tile is there says that the key warpgroups have done with its dO and with Q of the
// tile before: tiles of rows need no barriers to be given back.
#pragma once

#include "cuda/kernels/tile/dq_order.cuh"
#include "cuda/kernels/tile/mask_copy.cuh"
#include "cuda/kernels/tile/wgmma/backward_memory.cuh"
#include "cuda/kernels/tile/wgmma/dq_turns.cuh"
#include "cuda/kernels/tile/wgmma/dscore_bias.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqWarpgroup {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kAtOnce = 8;  // blocks of columns, whose sums are in registers
  static constexpr int kThreads = 128;
  static constexpr bool kMakesDbias =
      kConfig.dbias.how != BiasGradient::none && !has_dbias_warpgroup(kConfig);
  static constexpr int kNoPanel = 16;  // a tile of one panel: no next one begins anywhere

  const KernelParams& params;
  const BackwardMaps& maps;
  Memory memory;
  DqTurns<kConfig> turns{params};
  int64 rows_of_head, first_row_of_sequence;  // of dq's sums

  REGARD_DEVICE void set_rows(const BackwardTask& task) {
    rows_of_head = dq_rows(params.problem);
    first_row_of_sequence = first_dq_row(params.problem, task.seq.whole(), task.b);
  }
  // A tile's first row of dq's sums.
  REGARD_DEVICE int64 first_sum(const BackwardStep& step) const {
    return step.head * rows_of_head + first_row_of_sequence + step.tile * kRows;
  }

  // ----------------------------------------------------------------------------------------- loads

  REGARD_DEVICE int batch_of(const BackwardTask& task) const {
    return params.problem.packed ? 0 : task.b;
  }
  REGARD_DEVICE void load_panels(SharedAddress to, int columns, int rows, const TensorMap& map,
                                 int row, int head, int batch, SharedAddress barrier) const {
    for (int panel = 0; panel < panels_of(columns); ++panel) {
      tma_load(to + panel * panel_bytes(rows), map,
               {.column = panel * kPanelColumns, .row = row, .head = head, .batch = batch},
               barrier);
    }
  }
  REGARD_DEVICE void load_keys(const BackwardTask& task) const {
    const SharedAddress barrier = memory.barrier(Memory::kKeysFull);
    mbarrier_arrive_expect_tx(barrier, panels_of(kConfig.dim) * panel_bytes(kKeys));
    load_panels(memory.keys(), kConfig.dim, kKeys, maps.k, task.seq.first_k + task.first_key,
                task.kv, batch_of(task), barrier);
  }
  REGARD_DEVICE void load_values(const BackwardTask& task) const {
    const SharedAddress barrier = memory.barrier(Memory::kValuesFull);
    mbarrier_arrive_expect_tx(barrier, panels_of(kConfig.dim_v) * panel_bytes(kKeys));
    load_panels(memory.values(), kConfig.dim_v, kKeys, maps.v, task.seq.first_k + task.first_key,
                task.kv, batch_of(task), barrier);
  }

  // The terms of a tile's rows: of lse, or `of_delta`.
  REGARD_DEVICE const uint8* terms_of(const BackwardStep& step, bool of_delta) const {
    const int64 row = first_sum(step) + (of_delta ? term_rows(params.problem) : 0);
    return static_cast<const uint8*>(params.buffers.row_terms) + row * kRowTermBytes;
  }
  REGARD_DEVICE void load_queries(const BackwardTask& task, const BackwardStep& step,
                                  int use) const {
    const int stage = use % Memory::kQueryStages;
    const SharedAddress barrier = memory.barrier(Memory::kQueryFull, stage);
    mbarrier_arrive_expect_tx(barrier,
                              panels_of(kConfig.dim) * panel_bytes(kRows) + kRows * kRowTermBytes);
    load_panels(memory.queries(stage), kConfig.dim, kRows, maps.q,
                task.seq.first_q + step.tile * kRows, step.head, batch_of(task), barrier);
    bulk_load(memory.lse(stage), terms_of(step, false), kRows * kRowTermBytes, barrier);
  }
  REGARD_DEVICE void load_douts(const BackwardTask& task, const BackwardStep& step, int use) const {
    const int stage = Memory::dout_stage(use);
    const SharedAddress barrier = memory.barrier(Memory::kDoutFull, stage);
    const int terms = kConfig.cta_pair ? 0 : kRows * kRowTermBytes;  // a pair's came with Q
    mbarrier_arrive_expect_tx(barrier, panels_of(kConfig.dim_v) * panel_bytes(kRows) + terms);
    load_panels(memory.douts(stage), kConfig.dim_v, kRows, maps.dout,
                task.seq.first_q + step.tile * kRows, step.head, batch_of(task), barrier);
    if constexpr (!kConfig.cta_pair) {
      bulk_load(memory.delta(stage), terms_of(step, true), kRows * kRowTermBytes, barrier);
    }
  }

  // What the first two tiles need, in the order in which they need it.
  REGARD_DEVICE void load_first(const BackwardTask& task, const BackwardStep& first) const {
    load_keys(task);
    load_queries(task, first, 0);
    load_values(task);
    load_douts(task, first, 0);
    if (task.steps == 1) return;
    BackwardStep second = first;
    second.advance(task);
    load_queries(task, second, 1);
    load_douts(task, second, 1);
  }

  // Copies rows of kBytes bytes, kAtOnce at a time, of which `left` exist in the first `count`
  // rows. In steps: the addresses of all copies at once would take too many registers.
  template <int kBytes, int kAtOnce>
  static REGARD_DEVICE void copy_rows(const TileView& tile, const uint8* from, int64 row_bytes,
                                      int count, int left) {
    constexpr int kChunks = kBytes / kAtOnce, kStep = kThreads / kChunks;
    const int bytes = thread_index() % kChunks * kAtOnce;
    const int exist = clamp_to(left - bytes, 0, kAtOnce);
    int row = thread_index() / kChunks;
    SharedAddress to = tile.begin + row * tile.row_bytes + bytes;
    from += row * row_bytes + bytes;
#pragma unroll 1
    for (; row < kRows; row += kStep) {
      const int some = row < count ? exist : 0;
      cp_async<kAtOnce>(to, some > 0 ? from : nullptr, some);
      from += kStep * row_bytes;
      to += kStep * tile.row_bytes;
    }
  }
  REGARD_DEVICE void load_bias(const BackwardTask& task, const BackwardStep& step, int use) const {
    constexpr int kBytes = element_bytes(kConfig.bias.type);
    static_assert(stages_bias(kConfig));
    const View& bias = params.problem.bias;
    const int first_row = step.tile * kRows;
    const int64 first = offset_of(bias.strides, task.b, step.head, 0, first_row) + task.first_key;
    const uint8* const from = static_cast<const uint8*>(bias.data) + first * kBytes;
    if constexpr (kConfig.bias.one_row) {
      load_tile<kThreads, 1, kKeys, kBytes, kConfig.bias.aligned, false>(
          memory.bias_tile(use & 1), 1, task.key_count, RowsInMemory{from, 0});
    } else {
      copy_rows<kKeys * kBytes, 16>(memory.bias_tile(use & 1), from, bias.strides.row * kBytes,
                                    task.seq.len_q - first_row, task.key_count * kBytes);
    }
  }
  REGARD_DEVICE void load_mask(const BackwardTask& task, const BackwardStep& step, int use) const {
    const View& mask = params.problem.mask;
    const int first_row = step.tile * kRows, count = task.seq.len_q - first_row;
    const int64 column = mask.strides.column;
    const int64 first =
        offset_of(mask.strides, task.b, step.head, 0, first_row) + task.first_key * column;
    const uint8* const from = static_cast<const uint8*>(mask.data) + first;
    if constexpr (kConfig.mask.one_row || kConfig.mask.copy_bytes == 1) {
      constexpr int kStaged = mask_rows(kConfig);
      load_mask_tile<kThreads, kStaged, kKeys, kConfig.mask.copy_bytes>(
          memory.mask_tile(use & 1), smaller(count, kStaged), task.key_count, task.first_key,
          column, RowsInMemory{from, mask.strides.row});
    } else {
      copy_rows<kKeys, kConfig.mask.copy_bytes>(memory.mask_tile(use & 1), from, mask.strides.row,
                                                count, task.key_count);
    }
  }
  // The bias and the mask of a tile's rows and the block's keys.
  REGARD_DEVICE void load_pair_terms(const BackwardTask& task, const BackwardStep& step,
                                     int use) const {
    if constexpr (kConfig.features.bias) load_bias(task, step, use);
    if constexpr (kConfig.features.mask) load_mask(task, step, use);
    cp_async_commit();
  }
  REGARD_DEVICE void hand_over_pair_terms(int use) const {
    cp_async_wait<0>();
    mbarrier_arrive(memory.barrier(Memory::kPairTermsFull, use & 1));
  }

  // -------------------------------------------------------------------------------------------- dq

  // Of the tile's 64 rows, kBlocks blocks of columns: over all keys.
  template <int kBlocks>
  REGARD_DEVICE void multiply(Accumulator (&sums)[kBlocks], int buffer, int first_block) const {
    const uint32 a = descriptor_word(memory.dscores(buffer), kNoPanel);
    const SharedAddress keys = memory.keys() + first_block / 8 * panel_bytes(kKeys);
    const uint32 b = descriptor_word(keys, kNoPanel);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      wgmma_ss_tn<Format>(sums, matrix_descriptor(a + k * panel_bytes(16) / 16),
                          matrix_descriptor(b + k * panel_bytes(16) / 16), k > 0);
    }
    wgmma_commit();
  }

  template <int kBlocks>
  REGARD_DEVICE void add_to_memory(const Accumulator (&sums)[kBlocks], const BackwardTask& task,
                                   const BackwardStep& step, int first_block) const {
    if (step.tile * kRows + warp_index() * 16 >= task.seq.len_q) return;
    const int64 unit = first_sum(step) / 16 + warp_index();
    float* const to =
        params.buffers.dq_sums + dq_offset(kConfig, unit, first_block, lane_index(), 0);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) red_add_4(to + n * 128, sums[n]);
  }

  template <int kBlocks>
  REGARD_DEVICE void make_part(const BackwardTask& task, const BackwardStep& step, int use,
                               int part) {
    constexpr int kParts = (kConfig.dim / 8 + kAtOnce - 1) / kAtOnce;
    const int first_block = part * kAtOnce;
    Accumulator sums[kBlocks];
    multiply(sums, use & 1, first_block);
    if (kConfig.ordered_dq && part == 0) turns.take(task, step);
    wgmma_wait<0>();
    fence_operand(sums);
    if (part == kParts - 1) free_dscores(use);
    add_to_memory(sums, task, step, first_block);
  }
  REGARD_DEVICE void free_dscores(int use) const {
    const SharedAddress barrier = memory.barrier(Memory::kDscoreEmpty, use & 1);
    if (lane_index() == 0) mbarrier_arrive(barrier);
  }
  REGARD_DEVICE void make_dq(const BackwardTask& task, const BackwardStep& step, int use) {
    constexpr int kBlocks = kConfig.dim / 8, kWhole = kBlocks / kAtOnce, kRest = kBlocks % kAtOnce;
#pragma unroll 1
    for (int part = 0; part < kWhole; ++part) {
      make_part<kAtOnce>(task, step, use, part);
    }
    if constexpr (kRest > 0) make_part<kRest>(task, step, use, kWhole);
  }

  // -------------------------------------------------------------------------------------- the walk

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task(memory.task());
    DscoreBias<kConfig> dbias{params, memory};
    if constexpr (kMakesDbias) dbias.clear_unseen(task);
    if (task.steps == 0) return;
    set_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    BackwardStep ahead = step;  // the tile that is loaded next
    if (thread_index() == 0) load_first(task, step);
    sync_warp();
#pragma unroll 1
    for (int use = 0; use < 2; ++use) {
      if constexpr (kHasPairTerms<kConfig>) {
        if (use < task.steps) {
          load_pair_terms(task, ahead, use);
          hand_over_pair_terms(use);
        }
      }
      ahead.advance(task);
    }
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    const int steps = task.steps;
#pragma unroll 1
    for (int use = 0; use < steps; ++use) {
      make_opaque(memory.begin);
      mbarrier_wait(memory.barrier(Memory::kDscoreFull, use & 1), parity_of(use));
      if (thread_index() == 0 && use + 2 < steps) {
        load_queries(task, ahead, use + 2);
        load_douts(task, ahead, use + 2);
      }
      sync_warp();
      if constexpr (kHasPairTerms<kConfig>) {
        if (use + 2 < steps) load_pair_terms(task, ahead, use + 2);
      }
      if constexpr (kConfig.wanted.dq) {
        make_dq(task, step, use);
      } else {
        free_dscores(use);
      }
      if constexpr (kMakesDbias) dbias.add(task, step, use);
      if constexpr (kHasPairTerms<kConfig>) {
        if (use + 2 < steps) hand_over_pair_terms(use + 2);
      }
      step.advance(task);
      ahead.advance(task);
    }
    if constexpr (kConfig.ordered_dq) turns.finish();
  }
};

}  // namespace regard
