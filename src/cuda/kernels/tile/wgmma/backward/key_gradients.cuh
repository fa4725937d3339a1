// dk and dv of a warpgroup's 64 keys, from registers to memory, and the flags of keys whose
// gradient is not finite.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct KeyGradients {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr int kPanels = panels_of(kConfig.dim_v);  // of `staging`

  const KernelParams& params;
  const Memory memory;
  const BackwardTask& task;
  const int own_key;            // the warpgroup's first key in the tile
  const SharedAddress staging;  // panels of keys that nobody reads any more
  const NamedBarrier barrier;   // of the warpgroup
  const int fragment;           // as in KeyWarpgroup
  const int first_key = task.first_key + own_key;
  const int keys_left = task.key_count - own_key;  // <= 0: none
  const int warp_key = warp_index() % 4 * 16;

  REGARD_DEVICE int key_of(int half) const { return warp_key + half * 8 + lane_index() / 4; }
  REGARD_DEVICE bool issues() const { return thread_index() % 128 == 0; }
  REGARD_DEVICE void sync() const { bar_sync(barrier, 128); }

  template <int kBlocks>
  REGARD_DEVICE void write(Accumulator (&sums)[kBlocks], KeyGradient gradient, const TensorMap& map,
                           const View& view, int columns, float factor) const {
    bool nonfinite[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) nonfinite[half] = finish_key(sums, gradient, half, factor);
    if (keys_left <= 0) return;
    if constexpr (kConfig.split_q) {
      store_parts(sums, partial_dkv(params, gradient), columns);
      return;
    }
    if constexpr (kConfig.out_by_tma) {
      store_panels(sums, map, view, columns);
      return;
    }
    if (view.type == Type::f32) {
      store_pairs<Type::f32>(sums, view, columns, nonfinite);
    } else {
      store_pairs<kConfig.type>(sums, view, columns, nonfinite);
    }
  }

  // Scales a key's sums. If some are not finite, flags the key and returns true.
  template <int kBlocks>
  REGARD_DEVICE bool finish_key(Accumulator (&sums)[kBlocks], KeyGradient gradient, int half,
                                float factor) const {
    int nonfinite = 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = sums[n][half * 2 + e];
        x *= factor;
        if constexpr (kConfig.flags_nonfinite) nonfinite |= !(x - x == 0);
      }
    }
    if constexpr (kConfig.flags_nonfinite) {
      nonfinite |= shuffle_xor(nonfinite, 1);
      nonfinite |= shuffle_xor(nonfinite, 2);
      if (nonfinite && lane_index() % 4 == 0 && key_of(half) < keys_left) {
        const Problem& p = params.problem;
        flag_key(params,
                 task.dkv_head * p.sizes.rows_k +
                     flat_key(p, task.seq.whole(), task.b, first_key + key_of(half)),
                 gradient);
      }
    }
    return nonfinite != 0;
  }

  // Stores by TMA, through `staging`, except the last keys of a packed sequence.
  template <int kBlocks>
  REGARD_DEVICE void store_panels(const Accumulator (&sums)[kBlocks], const TensorMap& map,
                                  const View& view, int columns) const {
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
      if (kConfig.varlen && keys_left < kWarpgroupRows) {
        sync_warp();
        copy_last_keys(first, view, columns);
        continue;
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
             .head = task.dkv_head,
             .batch = params.problem.packed ? 0 : task.b},
            staging + (panel - first) * panel_bytes(Memory::kKeys) + own_key * kPanelRowBytes);
      }
      tma_store_commit();
    }
  }

  // The warp's keys, from the panels that begin with number `first`.
  REGARD_DEVICE void copy_last_keys(int first, const View& view, int columns) const {
    const int64 to =
        offset_of(view.strides, task.b, task.dkv_head, task.seq.first_k, first_key + warp_key) +
        first * kPanelColumns;
    copy_rows<kPanels * 8>(staging, Memory::kKeys, own_key + warp_key,
                           clamp_to(keys_left - warp_key, 0, 16), columns / 8 - first * 8,
                           reinterpret_cast<uint8*>(static_cast<uint16*>(view.data) + to),
                           view.strides.row * 2);
  }

  // split_q: stores partial sums, whose rows have room for whole pairs.
  template <int kBlocks>
  REGARD_DEVICE void store_parts(const Accumulator (&sums)[kBlocks], const View& view,
                                 int columns) const {
    const int first_column = lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key_of(half) >= keys_left) continue;
      float* const to = static_cast<float*>(view.data) + first_column +
                        offset_of(view.strides, task.b, task.dkv_head, task.seq.first_k,
                                  first_key + key_of(half));
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        if (first_column + n * 8 >= columns) continue;
        store_global_64(to + n * 8, bits_of(sums[n][half * 2]), bits_of(sums[n][half * 2 + 1]));
      }
    }
  }

  // Stores from registers: f32 gradients, gradients that are added to earlier ones, and rows that
  // TMA cannot address.
  template <Type kType, int kBlocks>
  REGARD_DEVICE void store_pairs(const Accumulator (&sums)[kBlocks], const View& view, int columns,
                                 const bool (&nonfinite)[2]) const {
    using Stored = typename ElementOf<kType>::Stored;
    const Problem& p = params.problem;
    const int first_column = lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key_of(half) >= keys_left) continue;
      // The fix-up pass adds the gradient that it computes to what is there.
      if (kConfig.flags_nonfinite && p.accumulate && nonfinite[half]) continue;
      Stored* const to = static_cast<Stored*>(view.data) + first_column +
                         offset_of(view.strides, task.b, task.dkv_head, task.seq.first_k,
                                   first_key + key_of(half));
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

  // TMA must have read the block's shared memory before the block ends.
  REGARD_DEVICE void finish() const {
    if (kConfig.out_by_tma && issues()) tma_store_wait_read();
  }
};

}  // namespace regard
