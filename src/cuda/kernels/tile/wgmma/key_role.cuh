// What warpgroups of a wgmma backward block that have 64 of its keys share: the products
// of a tile of rows, the rows and keys that are no part of the task, and results.
#pragma once

#include "cuda/kernels/tile/wgmma/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/key_results.cuh"
#include "cuda/kernels/tile/wgmma/key_scores.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyRole {
  using Memory = BackwardMemory<kConfig>;
  using Elementwise = KeyScores<kConfig>;
  using Scores = typename Elementwise::Scores;
  using Operand = typename Elementwise::Operand;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kBothWarpgroups = 3;  // the number of a barrier; 1 and 2 are each one's own
  static constexpr int kWarpBytes = 16 * kPanelRowBytes;  // of P^T, and of dS^T, of a warp's keys

  const KernelParams& params;
  const BackwardMaps& maps;
  Memory memory;
  const int number;       // of this warpgroup's barrier
  const int own_key = 0;  // its first key in the tile
  const int warp_key = own_key + warp_index() % 4 * 16;
  const Elementwise elementwise{params, warp_key};
  // Where a lane's row of a fragment of 16 keys begins in a panel of keys.
  const int fragment = swizzled_offset(warp_key + lane_index() % 16, lane_index() / 16);

  Scores x;
  uint32 factors[4];    // of row terms, as an operand
  ShortInterval whole;  // the rows from which all keys are seen

  // -------------------------------------------------------------------------------------- products

  // x = A B^T over the columns of both, and the rows' terms.
  template <int kSteps, bool kAdds>
  REGARD_DEVICE void multiply_scores(SharedAddress keys, SharedAddress rows, SharedAddress terms) {
    wgmma_fence();
    if constexpr (kAdds) {
      wgmma_rs_nt<Format>(x, factors, unswizzled_descriptor(terms), false);
    }
    const uint32 a = descriptor_word(keys, 0), b = descriptor_word(rows, 0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k % 4 * 2;
      wgmma_ss_nt<Format>(x, matrix_descriptor(a + k / 4 * (panel_bytes(kKeys) / 16) + column),
                          matrix_descriptor(b + k / 4 * (panel_bytes(kRows) / 16) + column),
                          kAdds || k > 0);
    }
    wgmma_commit();
  }

  // sums += A rows, over the tile's rows.
  template <int kBlocks>
  static REGARD_DEVICE void multiply_rows(Accumulator (&sums)[kBlocks], const Operand& a,
                                          SharedAddress rows) {
    const uint32 b = descriptor_word(rows, panel_bytes(kRows));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      wgmma_rs_nn<Format>(sums, a[k], matrix_descriptor(b + k * panel_bytes(16) / 16), true);
    }
    wgmma_commit();
  }

  template <int kBlocks>
  static REGARD_DEVICE void clear_sums(Accumulator (&sums)[kBlocks]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = 0;
    }
    fence_operand(sums);
  }

  // ----------------------------------------------------------------------------------------- tiles

  // Rows of a tile that belong to another sequence, or to none: whatever they hold must not meet a
  // weight of 0. `threads` of a barrier have the tile.
  REGARD_DEVICE void clear_rows(SharedAddress tile, int panels, int rows, int first, int thread,
                                int threads, int at_barrier) const {
    for (int panel = 0; panel < panels; ++panel) {
      for (int piece = first * 8 + thread; piece < rows * 8; piece += threads) {
        store_shared_128(tile + panel * panel_bytes(rows) + piece * 16, {});
      }
    }
    fence_proxy_async();
    bar_sync(at_barrier, threads);
  }
  // Of keys or values, which one warpgroup multiplies by.
  REGARD_DEVICE void clear_foreign_keys(const BackwardTask& task, SharedAddress tile,
                                        int columns) const {
    if (task.key_count >= kKeys) return;
    clear_rows(tile, panels_of(columns), kKeys, task.key_count, thread_index() % 128, 128, number);
  }
  // Both warpgroups multiply by a tile of rows; both call this for each, in the same order.
  REGARD_DEVICE void clear_foreign_rows(const BackwardTask& task, const BackwardStep& step,
                                        SharedAddress tile, int columns) const {
    const int count = task.seq.len_q - step.tile * kRows;
    if (count >= kRows) return;
    clear_rows(tile, panels_of(columns), kRows, count, thread_index() - 128, 256, kBothWarpgroups);
  }

  REGARD_DEVICE void arrive_once(int kind, int index) const {  // of each warp
    if (lane_index() == 0) mbarrier_arrive(memory.barrier(kind, index));
  }
  // Whoever has done with a tile of rows loads the one that takes its place.
  REGARD_DEVICE bool issues() const { return thread_index() % 128 == 0; }
  REGARD_DEVICE DqWarpgroup<kConfig> loader(const BackwardTask& task) const {
    DqWarpgroup<kConfig> loads{params, maps, memory};
    loads.set_rows(task);
    return loads;
  }
  static REGARD_DEVICE BackwardStep later_step(const BackwardTask& task, BackwardStep step) {
#pragma unroll
    for (int n = 0; n < Memory::kStages; ++n) step.advance(task);
    return step;
  }

  // ------------------------------------------------------------------------------------------ task

  // Sixteen columns of a product are the eight terms twice: half of the factors each time. `first`:
  // of a row's terms, the first that this warpgroup adds.
  REGARD_DEVICE void set_factors(int first) {
    const int pair = lane_index() % 4;
    const auto of = [&](int term) {
      return term < 0 || term >= kRowTerms ? 0.0f : 0.5f * row_term_factor<kConfig.type>(term);
    };
    const uint32 two = pack<Format>(of(pair * 2 - first), of(pair * 2 + 1 - first));
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = two;
  }

  REGARD_DEVICE void set_whole_rows(const BackwardTask& task) {
    const int first = task.first_key + own_key, last = first + kWarpgroupRows - 1;
    whole = {0, 0};
    if (last >= task.seq.len_k) return;
    whole = {0, task.seq.len_q};
    if constexpr (kConfig.features.interval) {
      const MaskParams& mask = params.problem.mask_params;
      whole = {int(visible_queries(mask, last, task.seq.len_q, task.seq.len_k).begin),
               int(visible_queries(mask, first, task.seq.len_q, task.seq.len_k).end)};
    }
  }
  REGARD_DEVICE bool hides(const BackwardStep& step) const {
    return step.tile * kRows < whole.begin || step.tile * kRows + kRows > whole.end;
  }

  // Where a lane's part of P^T lies on its way from the one warpgroup to the other, which then has
  // its dS^T, in another order, in the same bytes of the same warp.
  REGARD_DEVICE SharedAddress handed(int use) const {
    return memory.dscores(Memory::own_dscores(use)) + warp_key / 16 * kWarpBytes +
           lane_index() * 16;
  }

  template <int kBlocks>
  REGARD_DEVICE void write_result(Accumulator (&sums)[kBlocks], KeyGradient gradient,
                                  const BackwardTask& task, SharedAddress staging,
                                  const TensorMap& map, const View& view, int columns,
                                  float scale) const {
    const KeyResults<kConfig> results{params,  maps,    memory, task,
                                      own_key, staging, number, fragment};
    results.write(sums, gradient, map, view, columns, scale);
    results.finish();
  }
};

}  // namespace regard
