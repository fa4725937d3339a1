// The tiles of a wgmma backward block of f32: pairs of f16 planes by the copy engine, and their
// rows' terms.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"

namespace regard {

// The planes of a product's three terms, the small ones first: high with high and high with low;
// that of both low planes is below f32's last place.
inline constexpr int kPlaneTerms = 3;
REGARD_DEVICE constexpr int plane_of_a(int term) { return term == 0 ? 1 : 0; }
REGARD_DEVICE constexpr int plane_of_b(int term) { return term == 1 ? 1 : 0; }

// One thread calls these.
template <KernelConfig kConfig>
struct PlaneLoads {
  using Memory = BackwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;

  const KernelParams& params;
  const BackwardMaps& maps;
  const Memory memory;

  REGARD_DEVICE static int first_row(const Problem& p, const BackwardTask& task) {
    return first_hi_lo_row<int>(p, task.b, task.seq.first_q, int(p.sizes.len_q), kHiLoBackwardUnit);
  }
  REGARD_DEVICE static int first_key(const Problem& p, const BackwardTask& task) {
    return first_hi_lo_row<int>(p, task.b, task.seq.first_k, int(p.sizes.len_k),
                                kHiLoBackwardUnit) +
           task.first_key;
  }

  // The map has planes in place of batch entries.
  REGARD_DEVICE void load_planes(SharedAddress to, int columns, int rows, const TensorMap& map,
                                 int row, int head, SharedAddress barrier) const {
#pragma unroll 1
    for (int plane = 0; plane < kHiLoParts; ++plane) {
#pragma unroll 1
      for (int column = 0; column < columns; column += kPanelColumns) {
        tma_load(to, map, {.column = column, .row = row, .head = head, .batch = plane}, barrier);
        to += panel_bytes(rows);
      }
    }
  }
  REGARD_DEVICE void load_keys(const BackwardTask& task) const {
    const SharedAddress barrier = memory.barrier(Memory::kKeysFull);
    mbarrier_arrive_expect_tx(barrier, kHiLoParts * panels_of(kConfig.dim) * panel_bytes(kKeys));
    load_planes(memory.keys(), kConfig.dim, kKeys, maps.k, first_key(params.problem, task), task.kv,
                barrier);
  }
  REGARD_DEVICE void load_values(const BackwardTask& task) const {
    const SharedAddress barrier = memory.barrier(Memory::kValuesFull);
    mbarrier_arrive_expect_tx(barrier, kHiLoParts * panels_of(kConfig.dim_v) * panel_bytes(kKeys));
    load_planes(memory.values(), kConfig.dim_v, kKeys, maps.v, first_key(params.problem, task),
                task.kv, barrier);
  }

  // The first of a tile's terms: of lse, or `of_delta`.
  REGARD_DEVICE const void* terms_of(const BackwardStep& step, int row, bool of_delta) const {
    const Problem& p = params.problem;
    const int64 head = step.head + (of_delta ? p.sizes.heads_q : 0);
    return static_cast<const HiLoRowTerm*>(params.buffers.row_terms) + head * hi_lo_term_rows(p) +
           row;
  }
  REGARD_DEVICE void load_queries(const BackwardTask& task, const BackwardStep& step,
                                  int stage) const {
    const SharedAddress barrier = memory.barrier(Memory::kQueryFull, stage);
    constexpr int kTerms = kRows * row_term_bytes(kConfig);
    const int row = first_row(params.problem, task) + step.tile * kRows;
    mbarrier_arrive_expect_tx(barrier,
                              kHiLoParts * panels_of(kConfig.dim) * panel_bytes(kRows) + kTerms);
    load_planes(memory.queries(stage), kConfig.dim, kRows, maps.q, row, step.head, barrier);
    bulk_load(memory.lse(stage), terms_of(step, row, false), kTerms, barrier);
  }
  REGARD_DEVICE void load_douts(const BackwardTask& task, const BackwardStep& step,
                                int stage) const {
    const SharedAddress barrier = memory.barrier(Memory::kDoutFull, stage);
    constexpr int kTerms = kRows * row_term_bytes(kConfig);
    const int row = first_row(params.problem, task) + step.tile * kRows;
    mbarrier_arrive_expect_tx(barrier,
                              kHiLoParts * panels_of(kConfig.dim_v) * panel_bytes(kRows) + kTerms);
    load_planes(memory.douts(stage), kConfig.dim_v, kRows, maps.dout, row, step.head, barrier);
    bulk_load(memory.delta(stage), terms_of(step, row, true), kTerms, barrier);
  }
};

// The largest of a tile's dS^T in units of dout and k, of 64 keys, once their four warps have left
// theirs.
template <KernelConfig kConfig>
REGARD_DEVICE float largest_dscore(const BackwardMemory<kConfig>& memory, int use, int own_key) {
  const Bits128 of_warps = load_shared_128(memory.dscore_sizes(use & 1) + own_key / 16 * 4);
  return max_of(max_of(float_of(of_warps.word[0]), float_of(of_warps.word[1])),
                max_of(float_of(of_warps.word[2]), float_of(of_warps.word[3])));
}

}  // namespace regard
