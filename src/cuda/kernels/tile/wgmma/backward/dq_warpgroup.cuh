// Warpgroup 0 of a wgmma backward block: it makes dq and adds it to f32 sums in memory, one of its
// threads issues the TMA loads, and all of its threads copy bias and mask.
//
// Tiles of rows need no empty barriers here: once dS^T of a tile is complete, nobody reads its dO
// or the Q of the tile before. In a wide block the warpgroups that have finished with Q and dO load
// the next tiles themselves, except for the first tiles.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/cta_pair_dq.cuh"
#include "cuda/kernels/tile/wgmma/backward/dbias_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/f32_dq.cuh"
#include "cuda/kernels/tile/wgmma/backward/pair_term_loads.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DqWarpgroup {
  using Memory = BackwardMemory<kConfig>;
  static constexpr bool kMakesDbias =
      kConfig.dbias.how != BiasGradient::none && !has_dbias_warpgroup(kConfig);
  // How many tiles ahead bias and mask are loaded; except in a wide block, Q and dO too.
  static constexpr int kAhead = Memory::kWide ? 1 : 2;

  // Whether an elected thread loads. With it, D 128 is 1.01 to 1.02 times as fast; D 64 and 256
  // became slower (0.95 to 0.98), and in kernels with tile maps other threads spilled registers.
  static constexpr bool kElects =
      !Memory::kWide && !kConfig.tile_map && kConfig.tiling.rows == kPanelColumns;

  const KernelParams& params;
  const BackwardMaps& maps;
  const Memory memory;

  // Whether the walk advances during dq's product. With a tile map a step takes a hundred cycles,
  // and this warpgroup has no other time for it.
  static constexpr bool kWalksMeanwhile =
      kConfig.tile_map && kConfig.wanted.dq && !Memory::kF32 && !kMakesDbias;

  template <class Meanwhile>
  REGARD_DEVICE static void make_dq(DqSums<kConfig>& sums, const BackwardTask& task,
                                    const RowTile& tile, int iteration, Meanwhile meanwhile) {
    if constexpr (!kConfig.wanted.dq) {
      sync_warp();  // a lane that had not seen this phase could miss it, once lane 0 has arrived
      sums.free_dscores(iteration);
    } else if constexpr (Memory::kF32) {
      F32Dq<kConfig>{sums}.make_dq(task, tile, iteration);
    } else {
      sums.make_dq(task, tile, iteration, meanwhile);
    }
  }

  REGARD_DEVICE void run() {
    const BackwardTask task = uniform_task<kConfig>(memory.task());
    if constexpr (kMakesDbias) DbiasWarpgroup<kConfig>{params, memory}.clear_unseen(task);
    if (task.iterations == 0) return;
    DqSums<kConfig> sums{params, memory, {params, task}};
    const RowWalk<kConfig> tile = row_walk<kConfig>(params, task);
    const BackwardLoads<kConfig> loads{params, maps, memory, sums.rows};
    if constexpr (kElects) {
      by_elected_thread([&] { loads.load_first(task, tile); });
    } else if (thread_index() == 0) {
      loads.load_first(task, tile);
    }
    sync_warp();
    if constexpr (kConfig.cta_pair) {
      CtaPairDq<kConfig>{sums}.mainloop(task, tile);
    } else {
      mainloop(sums, task, tile);
    }
    if constexpr (kConfig.ordered_dq) sums.semaphore.release();
  }

  REGARD_DEVICE void mainloop(DqSums<kConfig>& sums, const BackwardTask& task,
                              const RowWalk<kConfig>& first) {
    Memory& memory = sums.memory;
    DbiasWarpgroup<kConfig> dbias{params, memory};
    RowWalk<kConfig> ahead = first;  // the tile that is loaded next
    TileBehind<kConfig, kAhead> behind{first};
#pragma unroll 1
    for (int iteration = 0; iteration < kAhead; ++iteration) {
      if constexpr (kHasPairTerms<kConfig>) {
        if (iteration < task.iterations) {
          const PairTermLoads<kConfig> pair_terms{params, memory};
          pair_terms.start(task, ahead, iteration);
          pair_terms.finish(iteration);
        }
      }
      behind.start(ahead);
      advance<kConfig>(ahead, params, task);
    }
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    const int iterations = task.iterations;
#pragma unroll 1
    for (int iteration = 0; iteration < iterations; ++iteration) {
      make_opaque(memory.begin);
      const PairTermLoads<kConfig> pair_terms{params, memory};
      const int later = iteration + kAhead;
      if constexpr (Memory::kWide && kHasPairTerms<kConfig>) {
        // Once P^T is complete, the only buffer of bias and mask is free.
        memory.await_full(Memory::kProbsFull, iteration);
        if (later < iterations) pair_terms.start(task, ahead, later);
      }
      memory.await_full(Memory::kDscoreFull, iteration);
      if constexpr (!Memory::kWide) {
        const BackwardLoads<kConfig> loads{params, maps, memory, sums.rows};
        if constexpr (kElects) {
          if (later < iterations) by_elected_thread([&] { loads.load_tile(task, ahead, later); });
        } else if (thread_index() == 0 && later < iterations) {
          loads.load_tile(task, ahead, later);
        }
        sync_warp();
        if constexpr (kHasPairTerms<kConfig>) {
          if (later < iterations) pair_terms.start(task, ahead, later);
        }
      }
      if constexpr (kWalksMeanwhile) {
        const RowTile tile = behind.tile();
        make_dq(sums, task, tile, iteration, [&] {
          behind.advance(ahead, params, task);
          advance<kConfig>(ahead, params, task);
        });
      } else {
        make_dq(sums, task, behind.tile(), iteration, [] {});
      }
      if constexpr (kMakesDbias) dbias.add(task, behind.tile(), iteration);
      if constexpr (kHasPairTerms<kConfig>) {
        if (later < iterations) pair_terms.finish(later);
      }
      if constexpr (!kWalksMeanwhile) {
        behind.advance(ahead, params, task);
        advance<kConfig>(ahead, params, task);
      }
    }
  }
};

}  // namespace regard
