// What the warpgroups of a wgmma backward block that have 64 of its keys share: products with a
// tile of rows, waiting for tiles, clearing what belongs to other sequences, and hand-overs.
//
// Scores are made transposed: S^T = K Q^T and dP^T = V dO^T, with keys along the accumulators'
// rows.
#pragma once

#include "cuda/kernels/tile/row_terms.cuh"
#include "cuda/kernels/tile/wgmma/backward/key_gradients.cuh"
#include "cuda/kernels/tile/wgmma/backward/key_scores.cuh"
#include "cuda/kernels/tile/wgmma/backward/loads.cuh"
#include "cuda/kernels/tile/wgmma/products.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyWarpgroup {
  using Memory = BackwardMemory<kConfig>;
  using Elementwise = KeyScores<kConfig>;
  using Scores = typename Elementwise::Scores;
  using Operand = typename Elementwise::Operand;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr bool kF32 = Memory::kF32;
  static constexpr int kParts = Memory::kParts;
  using Format = typename ElementOf<kF32 ? Type::f16 : kConfig.type>::Format;
  // TMA tiles of a packed batch may hold rows of other sequences. (f32: parts begin at whole
  // tiles.)
  static constexpr bool kClears = kConfig.varlen && !kF32;
  static constexpr int kWarpBytes = 16 * kPanelRowBytes;  // of P^T, and of dS^T, of a warp's keys

  const KernelParams& params;
  const BackwardMaps& maps;
  Memory memory;
  const int index;  // of the warpgroup among the two that have keys
  // The first key in the tile. In a wide block both warpgroups have all keys.
  const int own_key = Memory::kWide ? 0 : index * kWarpgroupRows;
  const int warp_key = own_key + warp_index() % 4 * 16;
  const Elementwise elementwise{params, warp_key};
  // A lane's row of a fragment of 16 keys, as an offset in a panel of keys.
  const int fragment = swizzled_offset(warp_key + lane_index() % 16, lane_index() / 16);

  Scores scores;             // S^T, or dP^T
  uint32 term_factors[4];    // what row terms are multiplied by, as an operand
  ShortInterval whole_rows;  // the rows that see all keys of the warpgroup

  REGARD_DEVICE NamedBarrier barrier() const { return NamedBarrier::dkdv_warpgroup + index; }
  // Calls run(task). With score terms, and in f32, there are no registers for a copy of the task.
  template <class Run>
  REGARD_DEVICE void with_task(Run run) const {
    if constexpr (Elementwise::kPlain && !kF32) {
      run(uniform_task<kConfig>(memory.task()));
    } else {
      run(memory.task());
    }
  }
  REGARD_DEVICE bool issues() const { return thread_index() % 128 == 0; }
  // One arrival for each warp.
  REGARD_DEVICE void arrive_once(typename Memory::Barrier kind, int stage) const {
    if (lane_index() == 0) mbarrier_arrive(memory.barrier(kind, stage));
  }

  // -------------------------------------------------------------------------------------- products

  // scores = A B^T over the columns of both, and the rows' terms.
  template <int kColumns, bool kAddsTerms>
  REGARD_DEVICE void multiply_scores(SharedAddress keys, SharedAddress rows, SharedAddress terms) {
    if constexpr (kAddsTerms && !kF32) add_row_terms(terms);
    multiply_nt<Format, kColumns, kKeys, kRows, kParts>(
        scores, descriptor_word(keys + panel_bytes(own_key), 0), descriptor_word(rows, 0),
        kAddsTerms && !kF32);
    wgmma_commit();
  }
  REGARD_DEVICE void add_row_terms(SharedAddress terms) {
    wgmma_rs_nt<Format>(scores, term_factors, unswizzled_descriptor(terms), false);
  }

  // sums += A rows over the tile's rows; f32: sums = A rows.
  template <int kBlocks>
  static REGARD_DEVICE void multiply_rows(Accumulator (&sums)[kBlocks], const Operand& a,
                                          SharedAddress rows) {
    multiply_nn<Format>(sums, a, descriptor_word(rows, panel_bytes(kRows)),
                        part_words(kBlocks * 8, kRows), !kF32);
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

  // A row has eight columns of terms, and a product takes sixteen: it takes them twice, with half
  // of each factor. kFirst: the column of the first of the three terms that this warpgroup adds.
  template <int kFirst>
  REGARD_DEVICE void set_term_factors() {
    const int first = lane_index() % 4 * 2 - kFirst;
    const auto of = [](int term) {
      return term < 0 || term >= kRowTerms ? 0.0f : 0.5f * row_term_factor<kConfig.type>(term);
    };
    const uint32 two = pack<Format>(of(first), of(first + 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) term_factors[i] = two;
  }

  // ----------------------------------------------------------------------------------------- tiles

  // The tile of the first iteration, and of the next one. If the loads bring tiles, receive_tile
  // gets the tile of an iteration once its Q is there.
  REGARD_DEVICE RowWalk<kConfig> first_tile(const BackwardTask& task) const {
    if constexpr (Memory::kLoadsBringTiles) return {};
    return row_walk<kConfig>(params, task);
  }
  REGARD_DEVICE void next_tile(RowWalk<kConfig>& tile, const BackwardTask& task) const {
    if constexpr (!Memory::kLoadsBringTiles) advance<kConfig>(tile, params, task);
  }
  REGARD_DEVICE void receive_tile(RowWalk<kConfig>& tile, int iteration) const {
    if constexpr (Memory::kLoadsBringTiles) {
      static_cast<RowTile&>(tile) = memory.read_tile(iteration);
    }
  }

  REGARD_DEVICE void clear_foreign_keys(const BackwardTask& task, SharedAddress tile,
                                        int columns) const {
    const int last = own_key + kWarpgroupRows;
    if (task.key_count >= last) return;
    const int first = Memory::kWide ? task.key_count : larger(task.key_count, own_key);
    clear_rows(tile, panels_of(columns), kKeys, first, last, thread_index() % 128, 128, barrier());
  }
  // Both warpgroups read a tile of rows, so they clear it together, and in the same order.
  REGARD_DEVICE void clear_foreign_rows(const BackwardTask& task, const RowTile& row_tile,
                                        SharedAddress tile, int columns) const {
    const int count = task.seq.len_q - row_tile.index * kRows;
    if (count >= kRows) return;
    clear_rows(tile, panels_of(columns), kRows, count, kRows, thread_index() - 128, 256,
               NamedBarrier::both_key_warpgroups);
  }

  REGARD_DEVICE void await_keys(const BackwardTask& task) const {
    mbarrier_wait(memory.barrier(Memory::kKeysFull), 0);
    if constexpr (kClears) clear_foreign_keys(task, memory.keys(), kConfig.dim);
  }
  REGARD_DEVICE void await_values(const BackwardTask& task) const {
    mbarrier_wait(memory.barrier(Memory::kValuesFull), 0);
    if constexpr (kClears) clear_foreign_keys(task, memory.values(), kConfig.dim_v);
  }
  REGARD_DEVICE void await_queries(const BackwardTask& task, RowWalk<kConfig>& tile, int iteration,
                                   int stage, int parity) const {
    mbarrier_wait(memory.barrier(Memory::kQueryFull, stage), parity);
    if constexpr (kClears) {
      receive_tile(tile, iteration);
      clear_foreign_rows(task, tile, memory.queries(stage), kConfig.dim);
    }
  }
  REGARD_DEVICE void await_douts(const BackwardTask& task, const RowTile& tile, int stage,
                                 int parity) const {
    mbarrier_wait(memory.barrier(Memory::kDoutFull, stage), parity);
    if constexpr (kClears) clear_foreign_rows(task, tile, memory.douts(stage), kConfig.dim_v);
  }

  // --------------------------------------------------------------------------------------- masking

  REGARD_DEVICE void set_whole_rows(const BackwardTask& task) {
    const int first = task.first_key + own_key, last = first + kWarpgroupRows - 1;
    whole_rows = {0, 0};
    if (last >= task.seq.len_k) return;
    whole_rows = {0, task.seq.len_q};
    if constexpr (kConfig.features.interval) {
      const Problem& p = params.problem;
      whole_rows = {int(rows_of_key<kConfig>(p, task.seq, task.b, last).begin),
                    int(rows_of_key<kConfig>(p, task.seq, task.b, first).end)};
    }
  }
  // Whether intervals, the end of the sequence, or with a tile map mask and spans hide pairs of the
  // tile.
  REGARD_DEVICE bool hides(const RowTile& tile) const {
    if (kConfig.tile_map && !tile.is_full) return true;
    return tile.index * kRows < whole_rows.begin || tile.index * kRows + kRows > whole_rows.end;
  }

  // ------------------------------------------------------------------------------------------ dS^T

  // Stores dS^T for the product of dq; each warp stores its 16 keys.
  REGARD_DEVICE void store_dscores(const Operand& ds, int iteration) const {
    const SharedAddress to = memory.dscores(Memory::dscore_buffer(iteration));
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      stmatrix(to + k / 4 * panel_bytes(kKeys) + (fragment ^ k % 4 << 5), ds[0][k]);
    }
  }
  // Called after the next products have begun: the fence is slow while copies are under way.
  REGARD_DEVICE void hand_over_dscores(int iteration) const {
    fence_proxy_async();
    sync_warp();
    if (Memory::kDscoreThreadsArrive || lane_index() == 0) {
      mbarrier_arrive(memory.barrier(Memory::kDscoreFull, iteration & 1));
    }
    // To every block of a cluster over the batch, from here, so that nothing else delays them.
    if (kConfig.cluster > 1 && lane_index() < kConfig.cluster) {
      mbarrier_arrive_cluster(
          address_in_cluster(memory.barrier(Memory::kPeersFull, iteration & 1), lane_index()));
    }
  }

  // ----------------------------------------------------------------------------------- wide blocks

  // Where a lane's part of P^T lies on its way from one warpgroup to the other, whose dS^T then
  // takes the same bytes of the same warp, in another order.
  REGARD_DEVICE SharedAddress probs_of_lane(int iteration) const {
    return memory.dscores(Memory::dscore_buffer(iteration)) + warp_key / 16 * kWarpBytes +
           lane_index() * 16;
  }
  // The warpgroup that has finished with a tile of rows last loads the tile that replaces it.
  REGARD_DEVICE BackwardLoads<kConfig> loads(const BackwardTask& task) const {
    return {params, maps, memory, {params, task}};
  }
  REGARD_DEVICE RowTile tile_after_stages(const BackwardTask& task, RowWalk<kConfig> tile) const {
#pragma unroll
    for (int n = 0; n < Memory::kStages; ++n) advance<kConfig>(tile, params, task);
    return tile;
  }

  // --------------------------------------------------------------------------------------- results

  REGARD_DEVICE float dv_factor() const {
    return kConfig.features.dropout ? float(keep_scale(params.problem.dropout)) : 1.0f;
  }
  // `staging`: panels of keys that nobody reads any more.
  REGARD_DEVICE KeyGradients<kConfig> results(const BackwardTask& task,
                                              SharedAddress staging) const {
    return {params, memory, task, own_key, staging, barrier(), fragment};
  }
  template <int kBlocks>
  REGARD_DEVICE void write_dk(Accumulator (&sums)[kBlocks],
                              const KeyGradients<kConfig>& results) const {
    const Problem& p = params.problem;
    results.write(sums, KeyGradient::dk, maps.dk, p.dk, int(p.sizes.dim), float(p.score.scale));
  }
  template <int kBlocks>
  REGARD_DEVICE void write_dv(Accumulator (&sums)[kBlocks],
                              const KeyGradients<kConfig>& results) const {
    const Problem& p = params.problem;
    results.write(sums, KeyGradient::dv, maps.dv, p.dv, int(p.sizes.dim_v), dv_factor());
  }
};

}  // namespace regard
