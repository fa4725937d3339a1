// The gradient of the bias, from the tiles of dS^T of a wgmma backward block, by the warpgroup that
// makes dq.
//
// Elements go straight to dbias where nothing else adds to them, else to f32 sums in memory. The
// batch entries that share a bias may be the blocks of a cluster: at the same time they have dS^T
// of the same rows and keys, each block sums its part of the tile over all of them, and the sum
// leaves once, always in the same order.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DscoreBias {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr BiasGradient kHow = kConfig.bias_gradient;
  static constexpr bool kOn = kHow != BiasGradient::none;
  static constexpr bool kSumsRows = kHow == BiasGradient::add_to_row;
  static constexpr bool kStores = kHow == BiasGradient::store;
  static constexpr bool kShares = kConfig.cluster > 1;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kGroupKeys = dbias_group(kConfig);  // of a tile's keys, moved at once
  static constexpr int kGroups = kKeys / kGroupKeys;
  static constexpr int kLaneKeys = kGroupKeys / 4;  // of a row, that a lane writes
  static constexpr int kThreads = 128, kBarrier = 5;
  // Blocks of a cluster whose dS^T is in registers at once.
  static constexpr int kAtOnce = kConfig.cluster <= 4 ? kConfig.cluster : kConfig.cluster / 2;
  static_assert(kConfig.cluster % kAtOnce == 0);
  static constexpr int kParts = dbias_parts(kConfig);  // 16-bit terms of an element's sum
  static constexpr Type kTo = writes_f32_dbias(kConfig) ? Type::f32 : kConfig.bias_type;
  static constexpr Type kTerm = kTo == Type::f16 ? Type::f16 : Type::bf16;
  using Term = typename ElementOf<kTerm>::Format;

  const KernelParams& params;
  const Memory memory;
  // Of the block's groups, those that it sums.
  const int first_group = kShares ? cluster_rank() * kGroups / kConfig.cluster : 0;
  const int end_group = kShares ? (cluster_rank() + 1) * kGroups / kConfig.cluster : kGroups;
  int turn = 0;       // of the two places where a group's sum passes shared memory
  float key_sum = 0;  // of a bias of one row: of this thread's key, over the rows of a head

  // ------------------------------------------------------------------------------------ the places

  REGARD_DEVICE const View& dbias() const { return params.problem.dbias; }
  REGARD_DEVICE const Strides& strides() const {
    return kStores ? dbias().strides : params.buffers.dbias_strides;
  }
  REGARD_DEVICE int64 head_offset(const BackwardTask& task, int head) const {
    return task.b * strides().batch + head * strides().head;
  }

  // A lane's keys of a row, of which `left` exist; the first is `at` in memory.
  REGARD_DEVICE void put(int64 at, int left, const float (&x)[kLaneKeys]) const {
    if constexpr (kStores) {
      store(at, left, x);
    } else {
      float* const to = params.buffers.dbias_sums + at;
      if (kConfig.dbias_aligned && left >= kLaneKeys) {
        add_global_4(to, x);
        return;
      }
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        if (e < left) add_global(to + e * strides().column, x[e]);
      }
    }
  }
  REGARD_DEVICE void store(int64 at, int left, const float (&x)[kLaneKeys]) const {
    if (params.problem.accumulate) {
#pragma unroll 1
      for (int e = 0; e < kLaneKeys && e < left; ++e) {
        const int64 to = at + e * strides().column;
        store_element(dbias().data, kTo, to,
                      load_element<float>(dbias().data, kTo, to) + choose(x, e));
      }
    } else if (kConfig.dbias_aligned && left >= kLaneKeys) {
      Bits128 words;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kTo == Type::f32) {
          words.word[w] = bits_of(x[w]);
        } else if (2 * w < kLaneKeys) {
          words.word[w] = pack<Term>(x[2 * w], x[2 * w + 1]);
        }
      }
      if constexpr (kTo == Type::f32) {
        store_global_128(static_cast<float*>(dbias().data) + at, words);
      } else if constexpr (kLaneKeys == 8) {
        store_global_128(static_cast<uint16*>(dbias().data) + at, words);
      } else {
        store_global_64(static_cast<uint16*>(dbias().data) + at, words.word[0], words.word[1]);
      }
    } else {
#pragma unroll 1
      for (int e = 0; e < kLaneKeys && e < left; ++e) {
        store_element(dbias().data, kTo, at + e * strides().column, choose(x, e));
      }
    }
  }
  // x[e], by selection: a register has no address.
  static REGARD_DEVICE float choose(const float (&x)[kLaneKeys], int e) {
    float chosen = x[0];
#pragma unroll
    for (int i = 1; i < kLaneKeys; ++i) chosen = e == i ? x[i] : chosen;
    return chosen;
  }

  // ------------------------------------------------------------------------------------- from dS^T

  // Adds a row of a group to a lane's sums: of the warp's rows, that of number 8 half + lane / 4,
  // from key kLaneKeys (lane % 4) on. A matrix of the load has eight of the keys, those of a lane
  // in neighbouring places, in an order that keeps all of them in different banks: what lane c has
  // first is turned by c.
  template <class Of>
  static REGARD_DEVICE void add_row(float (&sums)[kLaneKeys], SharedAddress group, int half) {
    constexpr int kWords = kLaneKeys / 2;
    const int place = lane_index() % 8, matrix = lane_index() / 8 % kWords;
    const int turned = kWords == 4 ? (matrix + place / 2) % 4 : matrix ^ place / 4;
    const int key = place / 2 * kLaneKeys + turned * 2 + place % 2;
    const int piece = warp_index() * 2 + (kWords == 4 ? half : lane_index() / 16);
    uint32 x[4];
    load_matrices_transposed(x, group + piece_offset(key, piece));
    const int lane = lane_index() % 4;
    if constexpr (kWords == 4) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const uint32 before[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
        for (int w = 0; w < 4; ++w) x[w] = lane & step ? before[(w + 4 - step) % 4] : before[w];
      }
    } else {
      const uint32 low = x[half * 2], high = x[half * 2 + 1];
      x[0] = lane & 2 ? high : low;
      x[1] = lane & 2 ? low : high;
    }
#pragma unroll
    for (int e = 0; e < kLaneKeys; ++e) sums[e] += widen<Of>(uint16(x[e / 2] >> e % 2 * 16));
  }

  // The sum of all blocks' dS^T of a group goes to shared memory: as one 16-bit term of the kind
  // that dbias has, or as two. A thread has eight rows of a key.
  REGARD_DEVICE void sum_group(SharedAddress group, SharedAddress to) const {
#pragma unroll
    for (int first_key = 0; first_key < kGroupKeys; first_key += kThreads / 8) {
      sum_keys(group, to, piece_offset(first_key + thread_index() / 8, thread_index() % 8));
    }
    sync_threads(kBarrier, kThreads);
  }
  REGARD_DEVICE void sum_keys(SharedAddress group, SharedAddress to, int own) const {
    float sums[8] = {};
#pragma unroll 1
    for (int first = 0; first < kConfig.cluster; first += kAtOnce) {
      Bits128 x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        x[n] = load_cluster_128(address_in_cluster(group + own, first + n));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sums[e] += widen<Format>(uint16(x[n].word[e / 2] >> e % 2 * 16));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Bits128 terms;
#pragma unroll
      for (int w = 0; w < 4; ++w) terms.word[w] = pack<Term>(sums[2 * w], sums[2 * w + 1]);
      store_shared_128(to + part * panel_bytes(kGroupKeys) + own, terms);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float rest = sums[e] - widen<Term>(uint16(terms.word[e / 2] >> e % 2 * 16));
        sums[e] = rest - rest == 0 ? rest : 0;  // what is not finite is in the first term alone
      }
    }
  }

  REGARD_DEVICE void put_group(int64 at, int64 rows_on, int left, int rows_left,
                               SharedAddress group) const {
    using Of = typename ElementOf<kShares ? kTerm : kConfig.type>::Format;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[kLaneKeys] = {};
#pragma unroll
      for (int part = 0; part < (kShares ? kParts : 1); ++part) {
        add_row<Of>(sums, group + part * panel_bytes(kGroupKeys), half);
      }
      if (rows_left > half * 8) put(at + half * rows_on, left, sums);
    }
  }

  // Some groups of a tile of rows and the block's keys, whose dS^T is in this buffer.
  REGARD_DEVICE void put_groups(const BackwardTask& task, const BackwardStep& step, int buffer,
                                int first, int end) {
    const Strides& s = strides();
    const int first_row = step.tile * kRows + warp_index() * 16 + lane_index() / 4;
    const int key = task.first_key + first * kGroupKeys + lane_index() % 4 * kLaneKeys;
    int64 at = head_offset(task, step.head) + first_row * s.row + key * s.column;
    int left = task.seq.len_k - key;
    const int rows_left = task.seq.len_q - first_row;
    SharedAddress group = memory.dscores(buffer) + first * panel_bytes(kGroupKeys);
#pragma unroll 1
    for (int n = first; n < end; ++n) {
      SharedAddress from = group;
      if constexpr (kShares) {
        from = memory.dbias_terms() + turn * kParts * panel_bytes(kGroupKeys);
        turn ^= 1;
        sum_group(group, from);
      }
      put_group(at, 8 * s.row, left, rows_left, from);
      group += panel_bytes(kGroupKeys);
      at += kGroupKeys * s.column;
      left -= kGroupKeys;
    }
  }

  // A bias of one row: each thread has a key, whose rows are one row of dS^T.
  REGARD_DEVICE void sum_rows(int buffer) {
    const int key = thread_index();
#pragma unroll
    for (int piece = 0; piece < kRows / 8; ++piece) {
      const Bits128 x = load_shared_128(memory.dscores(buffer) + piece_offset(key, piece));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        key_sum += widen<Format>(uint16(x.word[w])) + widen<Format>(uint16(x.word[w] >> 16));
      }
    }
  }
  REGARD_DEVICE void add_key_sum(const BackwardTask& task, int head) {
    const int j = task.first_key + thread_index();
    if (j < task.seq.len_k) {
      add_global(params.buffers.dbias_sums + head_offset(task, head) + j * strides().column,
                 key_sum);
    }
    key_sum = 0;
  }

  // ---------------------------------------------------------------------------------- what C calls

  // dS^T of this use is in all of the block's own memory: by one warp.
  REGARD_DEVICE void announce(int use) const {
    if constexpr (kShares) {
      if (lane_index() < kConfig.cluster) {
        arrive_in_cluster(
            address_in_cluster(memory.barrier(Memory::kPeersFull, use & 1), lane_index()));
      }
    }
  }
  // The part of a tile's work that is done beside the `part`th of so many products of dq. Other
  // blocks' dS^T is waited for as late as may be.
  REGARD_DEVICE void add(const BackwardTask& task, const BackwardStep& step, int use, int part,
                         int parts) {
    const bool is_last = part == parts - 1;
    if constexpr (kSumsRows) {
      if (!is_last) return;
      sum_rows(use & 1);
      if (step.tile + 1 == task.end_tile) add_key_sum(task, step.head);
    } else if constexpr (kShares) {
      if (!is_last) return;
      wait_barrier(memory.barrier(Memory::kPeersFull, use & 1), parity_of(use));
      put_groups(task, step, use & 1, first_group, end_group);
    } else if constexpr (kOn) {
      put_groups(task, step, use & 1, part * kGroups / parts, (part + 1) * kGroups / parts);
    }
  }

  // Tiles of rows that see none of the block's keys are not walked over: their elements are 0.
  REGARD_DEVICE void clear_unseen(const BackwardTask& task) const {
    if constexpr (kStores && kConfig.features.interval) {
      if (params.problem.accumulate) return;
      const int heads = int(params.problem.sizes.group());
      const int tiles = (task.seq.len_q + kRows - 1) / kRows;
#pragma unroll 1
      for (int h = 0; h < heads; ++h) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          if (tile >= task.first_tile && tile < task.end_tile) continue;
          clear_tile(task, {task.kv * heads + h, tile});
        }
      }
    }
  }
  REGARD_DEVICE void clear_tile(const BackwardTask& task, const BackwardStep& step) const {
    const Strides& s = strides();
    const int first_row = step.tile * kRows + warp_index() * 16 + lane_index() / 4;
    const int key = task.first_key + lane_index() % 4 * kLaneKeys;
    const int64 at = head_offset(task, step.head) + first_row * s.row + key * s.column;
#pragma unroll 1
    for (int n = first_group; n < end_group; ++n) {
      const int left = task.seq.len_k - key - n * kGroupKeys;
      const int64 to = at + n * kGroupKeys * s.column;
      if (first_row < task.seq.len_q) put(to, left, {});
      if (first_row + 8 < task.seq.len_q) put(to + 8 * s.row, left, {});
    }
  }
};

}  // namespace regard
