// The results of a warpgroup that has 64 keys: their dk, dv or both, and marks.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyResults {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr int kPanels = panels_of(kConfig.dim_v);  // that there is room for

  const KernelParams& params;
  const BackwardMaps& maps;
  const Memory memory;
  const BackwardTask& task;
  const int own_keys;           // the warpgroup's first key in the tile
  const SharedAddress staging;  // panels of [keys] that nobody else needs any more
  const int number;             // of the warpgroup's barrier
  const int fragment;           // of a lane in a panel of keys
  const int first_key = task.first_key + own_keys;
  const int keys_left = task.key_count - own_keys;  // <= 0: none
  const int warp_key = warp_index() % 4 * 16;

  REGARD_DEVICE int key_of(int half) const { return warp_key + half * 8 + lane_index() / 4; }
  REGARD_DEVICE bool issues() const { return thread_index() % 128 == 0; }
  REGARD_DEVICE void sync() const { bar_sync(number, 128); }

  template <int kBlocks>
  REGARD_DEVICE void write(Accumulator (&sums)[kBlocks], KeyGradient gradient, const TensorMap& map,
                           const View& view, int columns, float factor) const {
    bool spoiled[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) spoiled[half] = finish_key(sums, gradient, half, factor);
    if (keys_left <= 0) return;
    if constexpr (kConfig.out_by_tma) {
      if (!kConfig.varlen || keys_left >= kWarpgroupRows) {
        store_panels(sums, map);
        return;
      }
    }
    if (view.type == Type::f32) {
      store_pairs<Type::f32>(sums, view, columns, spoiled);
    } else {
      store_pairs<kConfig.type>(sums, view, columns, spoiled);
    }
  }

  // Scales a key's sums; whether some are not finite, which a mark then says.
  template <int kBlocks>
  REGARD_DEVICE bool finish_key(Accumulator (&sums)[kBlocks], KeyGradient gradient, int half,
                                float factor) const {
    int spoiled = 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = sums[n][half * 2 + e];
        x *= factor;
        if constexpr (kConfig.flags_nonfinite) spoiled |= !(x - x == 0);
      }
    }
    if constexpr (kConfig.flags_nonfinite) {
      spoiled |= shuffle_xor(spoiled, 1);
      spoiled |= shuffle_xor(spoiled, 2);
      if (spoiled && lane_index() % 4 == 0 && key_of(half) < keys_left) {
        const Problem& p = params.problem;
        flag_key(params,
                 task.kv * p.sizes.rows_k +
                     flat_key(p, task.seq.whole(), task.b, first_key + key_of(half)),
                 gradient);
      }
    }
    return spoiled != 0;
  }

  // By the copy engine.
  template <int kBlocks>
  REGARD_DEVICE void store_panels(const Accumulator (&sums)[kBlocks], const TensorMap& map) const {
    constexpr int kAll = (kBlocks + 7) / 8;
#pragma unroll
    for (int first = 0; first < kAll; first += kPanels) {
      if (issues()) tma_store_wait_read();
      sync();
#pragma unroll
      for (int n = first * 8; n < kBlocks && n < (first + kPanels) * 8; n += 2) {
        const uint32 m[4] = {pack<Format>(sums[n][0], sums[n][1]),
                             pack<Format>(sums[n][2], sums[n][3]),
                             pack<Format>(sums[n + 1][0], sums[n + 1][1]),
                             pack<Format>(sums[n + 1][2], sums[n + 1][3])};
        stmatrix(
            staging + (n / 8 - first) * panel_bytes(Memory::kKeys) + (fragment ^ n % 8 / 2 << 5),
            m);
      }
      fence_proxy_async();
      sync();
      if (!issues()) continue;
#pragma unroll
      for (int panel = first; panel < kAll && panel < first + kPanels; ++panel) {
        tma_store(
            map,
            {.column = panel * kPanelColumns,
             .row = task.seq.first_k + first_key,
             .head = task.kv,
             .batch = params.problem.packed ? 0 : task.b},
            staging + (panel - first) * panel_bytes(Memory::kKeys) + own_keys * kPanelRowBytes);
      }
      tma_store_commit();
    }
  }

  // From registers: f32, sums over calls, or what the copy engine cannot write.
  template <Type kType, int kBlocks>
  REGARD_DEVICE void store_pairs(const Accumulator (&sums)[kBlocks], const View& view, int columns,
                                 const bool (&spoiled)[2]) const {
    using Stored = typename ElementOf<kType>::Stored;
    const Problem& p = params.problem;
    const int first_column = lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key_of(half) >= keys_left) continue;
      // Whoever computes a marked gradient again adds it to what is there.
      if (kConfig.flags_nonfinite && p.accumulate && spoiled[half]) continue;
      Stored* const to =
          static_cast<Stored*>(view.data) + first_column +
          offset_of(view.strides, task.b, task.kv, task.seq.first_k, first_key + key_of(half));
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (first_column + n * 8 + e >= columns) continue;
          float x = sums[n][half * 2 + e];
          if (p.accumulate) x += load_element<float>(to, kType, n * 8 + e);
          store_element(to, kType, n * 8 + e, x);
        }
      }
    }
  }

  // Before the block ends: its shared memory has been read.
  REGARD_DEVICE void finish() const {
    if (kConfig.out_by_tma && issues()) tma_store_wait_read();
  }
};

}  // namespace regard
