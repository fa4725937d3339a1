// A key warpgroup of a wgmma backward block: dk and dv of 64 keys.
//
// For each tile of rows: S^T = K Q^T and dP^T = V dO^T in the same registers, dv += P^T dO and
// dk += dS^T Q with P^T and dS^T from registers, and dS^T to shared memory for the warpgroup that
// makes dq. Exponentials run under dk's product of the tile before; nothing is under way while dS^T
// is made. The key warpgroups of a block do not wait for each other, but where they
// clear rows.
#pragma once

#include "cuda/kernels/tile/wgmma/key_results.cuh"
#include "cuda/kernels/tile/wgmma/key_scores.cuh"

namespace regard {

// Steps of sixteen columns of K and of V that a warpgroup keeps in registers, to spare shared
// memory. By measurement.
template <KernelConfig kConfig>
struct HeldSteps {
  static constexpr bool kNarrow = kConfig.dim <= 64 && kConfig.dim_v <= 64;
  static constexpr bool kFree = KeyScores<kConfig>::kPlain && !kConfig.features.dropout;
  static constexpr bool kCausal = kConfig.features.interval;
  static constexpr int kKeys = !kFree ? 0 : kNarrow ? (kCausal ? 2 : 0) : 1;
  static constexpr int kValues = kFree && kNarrow && kCausal ? 2 : 0;
};

template <KernelConfig kConfig>
struct KeyWarpgroup {
  using Memory = BackwardMemory<kConfig>;
  using Elementwise = KeyScores<kConfig>;
  using Scores = typename Elementwise::Scores;
  using Operand = typename Elementwise::Operand;
  using Format = typename ElementOf<kConfig.type>::Format;
  using Held = HeldSteps<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kKeySteps = kConfig.dim / 16, kValueSteps = kConfig.dim_v / 16;
  static constexpr int kMostHeld = larger(1, larger(Held::kKeys, Held::kValues));
  using HeldOperand = uint32[kMostHeld][4];
  static constexpr int kBothWarpgroups = 3;  // the number of a barrier; 1 and 2 are each one's own
  static constexpr bool kOverlaps = kConfig.dim <= 64 && kConfig.dim_v <= 64;
  static constexpr bool kAddsLse = adds_lse_by_product(kConfig.features);
  static constexpr bool kAddsDelta = adds_delta_by_product(kConfig.features);

  const KernelParams& params;
  const BackwardMaps& maps;
  Memory memory;
  const int warpgroup;  // among those of keys
  const int warp_key = warpgroup * kWarpgroupRows + warp_index() % 4 * 16;
  const Elementwise elementwise{params, warp_key};
  const int own_rows = warpgroup * panel_bytes(kWarpgroupRows);
  // Where a lane's row of a fragment of 16 keys begins in a panel of keys.
  const int fragment = swizzled_offset(warp_key + lane_index() % 16, lane_index() / 16);

  Accumulator dk[kConfig.dim / 8], dv[kConfig.dim_v / 8];
  Scores x;
  Operand weights, shares, ds;
  HeldOperand held_keys, held_values;
  uint32 factors[4];    // of row terms, as an operand
  ShortInterval whole;  // the rows from which all keys are seen
  Ring<Memory::kQueryStages> queries;
  DropReader<Memory, 1> drop_reader;

  // -------------------------------------------------------------------------------------- products

  // x = A B^T over the columns of both, and the rows' terms.
  template <int kSteps, int kHeld, bool kAdds>
  REGARD_DEVICE void multiply_scores(const HeldOperand& held, SharedAddress own, SharedAddress rows,
                                     SharedAddress terms) {
    wgmma_fence();
    if constexpr (kAdds) {
      wgmma_rs_nt<Format>(x, factors, unswizzled_descriptor(terms), false);
    }
    const uint32 a = descriptor_word(own + own_rows, 0);
    const uint32 b = descriptor_word(rows, 0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k % 4 * 2;
      const uint64 b_tile = matrix_descriptor(b + k / 4 * (panel_bytes(kRows) / 16) + column);
      if (k < kHeld) {
        wgmma_rs_nt<Format>(x, held[k < kHeld ? k : 0], b_tile, kAdds || k > 0);
      } else {
        wgmma_ss_nt<Format>(x, matrix_descriptor(a + k / 4 * (panel_bytes(kKeys) / 16) + column),
                            b_tile, kAdds || k > 0);
      }
    }
    wgmma_commit();
  }
  REGARD_DEVICE void multiply_queries() {
    multiply_scores<kKeySteps, Held::kKeys, kAddsLse>(
        held_keys, memory.keys(), memory.queries(queries.stage), memory.lse(queries.stage));
  }
  REGARD_DEVICE void multiply_douts(int stage) {
    multiply_scores<kValueSteps, Held::kValues, kAddsDelta>(
        held_values, memory.values(), memory.douts(stage), memory.delta(stage));
  }

  // sums += A rows, over the tile's rows.
  template <int kBlocks>
  static REGARD_DEVICE void multiply_rows(Accumulator (&sums)[kBlocks], const Operand& a,
                                          SharedAddress rows) {
    const uint32 b = descriptor_word(rows, panel_bytes(kRows));
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      wgmma_rs_nn<Format>(sums, a[k], matrix_descriptor(b + k * panel_bytes(16) / 16), true);
    }
    wgmma_commit();
  }

  // --------------------------------------------------------------------------- tiles and operands

  // Rows of a tile that belong to another sequence, or to none: whatever they hold must not meet a
  // weight of 0. `threads` of a barrier have the tile.
  REGARD_DEVICE void clear_rows(SharedAddress tile, int panels, int rows, int first, int last,
                                int thread, int threads, int number) const {
    for (int panel = 0; panel < panels; ++panel) {
      for (int piece = first * 8 + thread; piece < last * 8; piece += threads) {
        store_shared_128(tile + panel * panel_bytes(rows) + piece * 16, {});
      }
    }
    fence_proxy_async();
    bar_sync(number, threads);
  }
  REGARD_DEVICE void clear_foreign_keys(const BackwardTask& task, SharedAddress tile,
                                        int columns) const {
    const int first = warpgroup * kWarpgroupRows, last = first + kWarpgroupRows;
    if (task.key_count >= last) return;
    clear_rows(tile, panels_of(columns), kKeys, larger(task.key_count, first), last,
               thread_index() % 128, 128, 1 + warpgroup);
  }
  REGARD_DEVICE void clear_foreign_rows(const BackwardTask& task, const BackwardStep& step,
                                        SharedAddress tile, int columns) const {
    const int count = task.seq.len_q - step.tile * kRows;
    if (count >= kRows) return;
    clear_rows(tile, panels_of(columns), kRows, count, kRows, thread_index() - 128,
               Memory::kKeyWarps * 32, kBothWarpgroups);
  }

  REGARD_DEVICE void hold_steps(HeldOperand& held, int count, SharedAddress tile) const {
#pragma unroll
    for (int k = 0; k < kMostHeld; ++k) {
      if (k < count) ldmatrix(held[k], tile + (fragment ^ k << 5));
    }
  }

  // Sixteen columns of a product are the eight terms twice: half of the factors each time.
  REGARD_DEVICE void set_factors() {
    const int pair = lane_index() % 4;
    const auto of = [](int term) { return 0.5f * row_term_factor<kConfig.type>(term); };
    const uint32 two = pair == 0   ? pack<Format>(of(0), of(1))
                       : pair == 1 ? pack<Format>(of(2), 0.0f)
                                   : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = two;
  }

  REGARD_DEVICE void set_whole_rows(const BackwardTask& task) {
    const int first = task.first_key + warpgroup * kWarpgroupRows;
    const int last = first + kWarpgroupRows - 1;
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

  // ------------------------------------------------------------------------------------------ dS^T

  REGARD_DEVICE void store_dscores(int use) const {
    mbarrier_wait(memory.barrier(Memory::kDscoreEmpty, use & 1), parity_of(use) ^ 1);
    const SharedAddress to = memory.dscores(use & 1);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) stmatrix(to + (fragment ^ k << 5), ds[k]);
  }
  // After the next products have begun: the fence takes a while where copies are under way.
  REGARD_DEVICE void hand_over(int use) const {
    fence_proxy_async();
    sync_warp();
    if (Memory::kEachHasRead || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kDscoreFull, use & 1));
    }
    // From here, so that nothing else of a block delays the others.
    if (kConfig.cluster > 1 && lane_index() < kConfig.cluster) {
      mbarrier_arrive_cluster(
          address_in_cluster(memory.barrier(Memory::kPeersFull, use & 1), lane_index()));
    }
  }

  // -------------------------------------------------------------------------------------- the walk

  REGARD_DEVICE void await_queries(const BackwardTask& task, const BackwardStep& step) {
    mbarrier_wait(memory.barrier(Memory::kQueryFull, queries.stage), queries.parity);
    if constexpr (kConfig.varlen) {
      clear_foreign_rows(task, step, memory.queries(queries.stage), kConfig.dim);
    }
  }
  REGARD_DEVICE void await_douts(const BackwardTask& task, const BackwardStep& step, int use) {
    mbarrier_wait(memory.barrier(Memory::kDoutFull, use & 1), parity_of(use));
    if constexpr (kConfig.varlen) {
      clear_foreign_rows(task, step, memory.douts(use & 1), kConfig.dim_v);
    }
  }

  REGARD_DEVICE void walk(const BackwardTask& task) {
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    if constexpr (kConfig.varlen) clear_foreign_keys(task, memory.keys(), kConfig.dim);
    hold_steps(held_keys, Held::kKeys, memory.keys());
    set_factors();
    set_whole_rows(task);
    BackwardStep step{task.kv * int(params.problem.sizes.group()), task.first_tile};
    await_queries(task, step);
    multiply_queries();
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    if constexpr (kConfig.varlen) clear_foreign_keys(task, memory.values(), kConfig.dim_v);
    hold_steps(held_values, Held::kValues, memory.values());
    wgmma_wait<0>();
    fence_operand(x);
    const int last = task.steps - 1;
#pragma unroll 1
    for (int use = 0;; ++use) {  // S^T is there, and dk's product of the tile before under way
      make_opaque(memory.begin);
      bool hides_pairs = hides(step);
      // Terms beside dk's product would take too many registers.
      if constexpr (!kOverlaps && !Elementwise::kPlain) wgmma_wait<0>();
      if constexpr (kHasPairTerms<kConfig>) {
        mbarrier_wait(memory.barrier(Memory::kPairTermsFull, use & 1), parity_of(use));
      }
      uint32 drops[1];
      if constexpr (Elementwise::kReadsDrops) drop_reader.read(drops, memory);
      hides_pairs = elementwise.make_weights(weights, shares, x, task, step, memory, queries.stage,
                                             use, hides_pairs);
      if constexpr (Elementwise::kReadsDrops) elementwise.drop(weights, shares, drops[0]);
      // The compiler moves the wait for products up to the branch before it. Above 64 columns it
      // must: exponentials beside dk's product would take too many registers.
      if constexpr (!kOverlaps) wgmma_wait<0>();
      await_douts(task, step, use);
      if constexpr (kOverlaps) wgmma_wait<0>();
      multiply_douts(use & 1);
      if constexpr (kConfig.wanted.dv) multiply_rows(dv, weights, memory.douts(use & 1));
      wgmma_wait<0>();
      fence_operand(x);
      elementwise.make_dscores(ds, Elementwise::kHasShares ? shares : weights, x, memory, use,
                               hides_pairs);
      store_dscores(use);
      const SharedAddress rows = memory.queries(queries.stage);
      queries.advance();
      if (use == last) {
        wgmma_fence();
        if constexpr (kConfig.wanted.dk) multiply_rows(dk, ds, rows);
        hand_over(use);
        break;
      }
      step.advance(task);
      await_queries(task, step);
      multiply_queries();
      if constexpr (kConfig.wanted.dk) {
        multiply_rows(dk, ds, rows);
      } else {
        wgmma_commit();
      }
      hand_over(use);
      wgmma_wait<1>();
      fence_operand(x);
    }
  }

  // Beside terms there are no registers for the task.
  REGARD_DEVICE void run() {
    if constexpr (Elementwise::kPlain) {
      run(uniform_task(memory.task()));
    } else {
      run(memory.task());
    }
  }
  REGARD_DEVICE void run(const BackwardTask& task) {
    clear_sums(dk);
    clear_sums(dv);
    if (task.steps > 0) walk(task);
    // dv was made before the last dS^T; the last product of dk is still under way.
    // The values, of which this warpgroup alone has read its rows.
    const KeyResults<kConfig> results{
        params,          maps,          memory,  task, warpgroup * kWarpgroupRows,
        memory.values(), 1 + warpgroup, fragment};
    if constexpr (kConfig.wanted.dv) {
      fence_operand(dv);
      results.write(dv, KeyGradient::dv, maps.dv, params.problem.dv,
                    int(params.problem.sizes.dim_v),
                    kConfig.features.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f);
    }
    wgmma_wait<0>();
    if constexpr (kConfig.wanted.dk) {
      fence_operand(dk);
      results.write(dk, KeyGradient::dk, maps.dk, params.problem.dk, int(params.problem.sizes.dim),
                    float(params.problem.score.scale));
    }
    results.finish();
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
};

}  // namespace regard
