// dbias from the tiles of dS^T of a wgmma backward block: warpgroup 3 makes it, or, if terms leave
// no registers for a fourth warpgroup, the dq warpgroup.
//
// An element is stored to dbias if one block alone makes it; else it is added to f32 sums in
// memory. The blocks of a cluster may be batch entries that share a bias. They have dS^T of the
// same rows and keys at the same time. Each block sums its part of the tile over all blocks, in a
// fixed order.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/memory.cuh"

namespace regard {

template <KernelConfig kConfig>
struct DbiasWarpgroup {
  using Memory = BackwardMemory<kConfig>;
  using Format = typename ElementOf<kConfig.type>::Format;
  static constexpr BiasGradient kHow = kConfig.dbias.how;
  static constexpr bool kOn = kHow != BiasGradient::none;
  static constexpr bool kSumsRows = kHow == BiasGradient::add_to_row;
  static constexpr bool kStores = kHow == BiasGradient::store;
  static constexpr bool kCluster = kConfig.cluster > 1;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;
  static constexpr int kGroupKeys = dbias_group(kConfig);  // keys that are moved at once
  static constexpr int kGroups = kKeys / kGroupKeys;
  static constexpr int kLaneKeys = kGroupKeys / 4;  // keys of a row that a lane writes
  static constexpr int kWords = kLaneKeys / 2;
  static constexpr int kThreads = 128;
  static constexpr int kParts = dbias_parts(kConfig);  // 16-bit parts of an element's sum
  static constexpr Type kTo = writes_f32_dbias(kConfig) ? Type::f32 : kConfig.bias.type;
  static constexpr Type kPart = kTo == Type::f16 ? Type::f16 : Type::bf16;
  using Part = typename ElementOf<kPart>::Format;
  // What goes to memory: the sums of a cluster, or dS^T.
  static constexpr Type kMoved = kCluster ? kPart : kConfig.type;
  using Moved = typename ElementOf<kMoved>::Format;
  static constexpr bool kMovesWords = kStores && kTo == kMoved;

  const KernelParams& params;
  const Memory memory;
  float key_sum = 0;  // bias of one row: of this thread's key, over the rows of a head

  static REGARD_DEVICE int thread() { return thread_index() % kThreads; }
  static REGARD_DEVICE int warp() { return warp_index() % (kThreads / 32); }

  // The groups of keys that this block sums.
  static REGARD_DEVICE int first_group() {
    return kCluster ? cluster_rank() * kGroups / kConfig.cluster : 0;
  }
  static REGARD_DEVICE int end_group() {
    return kCluster ? (cluster_rank() + 1) * kGroups / kConfig.cluster : kGroups;
  }

  // ---------------------------------------------------------------------------------------- memory

  REGARD_DEVICE const View& dbias() const { return params.problem.dbias; }
  REGARD_DEVICE const Strides& strides() const {
    return kStores ? dbias().strides : params.buffers.dbias_strides;
  }
  REGARD_DEVICE int64 head_offset(const BackwardTask& task, int head) const {
    return task.b * strides().batch + head * strides().head;
  }

  // A lane's keys of a row: `left` of them exist, and the first is element `at`.
  REGARD_DEVICE void put(int64 at, int left, const float (&x)[kLaneKeys]) const {
    if constexpr (kStores) {
      if (kConfig.dbias.aligned && left >= kLaneKeys && !params.problem.accumulate) {
        store_row(at, x);
      } else {
#pragma unroll 1
        for (int e = 0; e < kLaneKeys && e < left; ++e) store_key(at, e, choose(x, e));
      }
    } else {
      if (kConfig.dbias.aligned && left >= kLaneKeys) {
        red_add_4(params.buffers.dbias_sums + at, x);
      } else {
#pragma unroll 1
        for (int e = 0; e < kLaneKeys && e < left; ++e) {
          red_add(params.buffers.dbias_sums + at + e * strides().column, choose(x, e));
        }
      }
    }
  }
  REGARD_DEVICE void store_key(int64 at, int e, float x) const {
    at += e * strides().column;
    if (params.problem.accumulate) x += load_element<float>(dbias().data, kTo, at);
    store_element(dbias().data, kTo, at, x);
  }
  REGARD_DEVICE void store_row(int64 at, const float (&x)[kLaneKeys]) const {
    if constexpr (kTo == Type::f32) {
      Bits128 words;
#pragma unroll
      for (int w = 0; w < 4; ++w) words.word[w] = bits_of(x[w]);
      store_global_128(static_cast<float*>(dbias().data) + at, words);
    } else {
      uint32 words[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = pack<Part>(x[2 * w], x[2 * w + 1]);
      store_words(at, words);
    }
  }
  REGARD_DEVICE void store_words(int64 at, const uint32 (&x)[kWords]) const {
    uint16* const to = static_cast<uint16*>(dbias().data) + at;
    if constexpr (kWords == 4) {
      store_global_128(to, {x[0], x[1], x[2], x[3]});
    } else {
      store_global_64(to, x[0], x[1]);
    }
  }
  // x[e] by selection, because registers have no address.
  template <class T, int kCount>
  static REGARD_DEVICE T choose(const T (&x)[kCount], int e) {
    T chosen = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) chosen = e == i ? x[i] : chosen;
    return chosen;
  }

  // ------------------------------------------------------------------------------------- from dS^T

  // A lane's keys of row 8 half + lane / 4 of the warp's rows, from key kLaneKeys (lane % 4) on.
  // Each matrix of the load has eight keys: two neighbouring ones for each of four lanes. Lane c
  // takes its pairs of keys rotated by c, so that a matrix's rows lie in different banks.
  static REGARD_DEVICE void read_row(uint32 (&row)[kWords], SharedAddress group, int half) {
    const int matrix_row = lane_index() % 8, matrix = lane_index() / 8 % kWords;
    const int rotated = kWords == 4 ? (matrix + matrix_row / 2) % 4 : matrix ^ matrix_row / 4;
    const int key = matrix_row / 2 * kLaneKeys + rotated * 2 + matrix_row % 2;
    const int piece = warp() * 2 + (kWords == 4 ? half : lane_index() / 16);
    uint32 x[4];
    ldmatrix_trans(x, group + swizzled_offset(key, piece));
    const int lane = lane_index() % 4;
    if constexpr (kWords == 4) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const uint32 before[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
        for (int w = 0; w < 4; ++w) x[w] = lane & step ? before[(w + 4 - step) % 4] : before[w];
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) row[w] = x[w];
    } else {
      const uint32 low = half ? x[2] : x[0], high = half ? x[3] : x[1];
      row[0] = lane & 2 ? high : low;
      row[1] = lane & 2 ? low : high;
    }
  }
  static REGARD_DEVICE float key_of(const uint32 (&row)[kWords], int e) {
    return widen<Moved>(uint16(choose(row, e / 2) >> e % 2 * 16));
  }

  // Sums dS^T of a group over all blocks into shared memory, as one or two 16-bit parts. The loads
  // of all blocks run at once. A thread has four or eight rows of a key, which takes few registers.
  REGARD_DEVICE void sum_group(SharedAddress group, SharedAddress to) const {
    constexpr int kSumWords = kConfig.cluster <= 4 && kParts == 1 ? 4 : 2;
    constexpr int kThreadsOfKey = 32 / kSumWords;
    const int word = thread() % kThreadsOfKey * kSumWords;
#pragma unroll
    for (int first = 0; first < kGroupKeys; first += kThreads / kThreadsOfKey) {
      const int key = first + thread() / kThreadsOfKey;
      sum_rows_of_key<kSumWords>(group, to, swizzled_offset(key, word / 4) + word % 4 * 4);
    }
    bar_sync(NamedBarrier::dbias_warpgroup, kThreads);
  }
  template <int kSumWords>
  REGARD_DEVICE void sum_rows_of_key(SharedAddress group, SharedAddress to, int own) const {
    uint32 x[kConfig.cluster][kSumWords];
#pragma unroll
    for (int n = 0; n < kConfig.cluster; ++n) {
      load_cluster(x[n], address_in_cluster(group + own, n));
    }
#pragma unroll
    for (int w = 0; w < kSumWords; ++w) {
      float low = widen<Format>(uint16(x[0][w])), high = widen<Format>(uint16(x[0][w] >> 16));
#pragma unroll
      for (int n = 1; n < kConfig.cluster; ++n) {
        low += widen<Format>(uint16(x[n][w]));
        high += widen<Format>(uint16(x[n][w] >> 16));
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32 both = pack<Part>(low, high);
        x[part][w] = both;
        low = rest_of(low, uint16(both));
        high = rest_of(high, uint16(both >> 16));
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_shared(to + part * panel_bytes(kGroupKeys) + own, x[part]);
    }
  }
  // x minus the part; 0 if x is not finite, so that only its first part is not.
  static REGARD_DEVICE float rest_of(float x, uint16 part) {
    const float rest = x - widen<Part>(part);
    return rest - rest == 0 ? rest : 0;
  }
  static REGARD_DEVICE void load_cluster(uint32 (&x)[4], SharedAddress from) {
    const Bits128 four = load_cluster_128(from);
#pragma unroll
    for (int w = 0; w < 4; ++w) x[w] = four.word[w];
  }
  static REGARD_DEVICE void load_cluster(uint32 (&x)[2], SharedAddress from) {
    load_cluster_64(from, x[0], x[1]);
  }
  static REGARD_DEVICE void store_shared(SharedAddress to, const uint32 (&x)[4]) {
    store_shared_128(to, {x[0], x[1], x[2], x[3]});
  }
  static REGARD_DEVICE void store_shared(SharedAddress to, const uint32 (&x)[2]) {
    store_shared_64(to, x[0], x[1]);
  }

  // Writes a group of a tile of rows. `task` is read from shared memory here, because the sums need
  // the registers.
  REGARD_DEVICE void put_group(const BackwardTask& task, const RowTile& tile, int n,
                               SharedAddress group) const {
    const Strides& s = strides();
    int row = tile.index * kRows + warp() * 16 + lane_index() / 4;
    const int key = task.first_key + n * kGroupKeys + lane_index() % 4 * kLaneKeys;
    const int left = task.seq.len_k - key;
    int64 at = head_offset(task, tile.head) + row * s.row + key * s.column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 words[kWords];
      read_row(words, group, half);
      if constexpr (kMovesWords) {
        if (row < task.seq.len_q) put_words(at, left, words);
      } else {
        float x[kLaneKeys];
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) x[e] = key_of(words, e);
        if constexpr (kCluster && kParts == 2) {
          read_row(words, group + panel_bytes(kGroupKeys), half);
#pragma unroll
          for (int e = 0; e < kLaneKeys; ++e) x[e] += key_of(words, e);
        }
        if (row < task.seq.len_q) put(at, left, x);
      }
      row += 8;
      at += 8 * s.row;
    }
  }
  // If dS^T and dbias have the same type.
  REGARD_DEVICE void put_words(int64 at, int left, const uint32 (&row)[kWords]) const {
    if (kConfig.dbias.aligned && left >= kLaneKeys && !params.problem.accumulate) {
      store_words(at, row);
    } else {
#pragma unroll 1
      for (int e = 0; e < kLaneKeys && e < left; ++e) store_key(at, e, key_of(row, e));
    }
  }

  REGARD_DEVICE void put_groups(const BackwardTask& task, const RowTile& tile,
                                int iteration) const {
    constexpr bool kEven = kGroups % kConfig.cluster == 0;
    const int count = kEven ? kGroups / kConfig.cluster : end_group() - first_group();
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int group = first_group() + n;
      SharedAddress from = memory.dscores(iteration & 1) + group * panel_bytes(kGroupKeys);
      if constexpr (kCluster) {
        const int buffer = (iteration * count + n) & 1;
        const SharedAddress sums = memory.dbias_terms() + buffer * kParts * panel_bytes(kGroupKeys);
        sum_group(from, sums);
        if (n + 1 == count) free(iteration & 1);
        from = sums;
      }
      put_group(task, tile, group, from);
    }
  }

  // Bias of one row: each thread sums a key over the rows of the tile.
  REGARD_DEVICE void sum_rows(int buffer) {
    const int key = thread();
#pragma unroll
    for (int piece = 0; piece < kRows / 8; ++piece) {
      const Bits128 x = load_shared_128(memory.dscores(buffer) + swizzled_offset(key, piece));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        key_sum += widen<Format>(uint16(x.word[w])) + widen<Format>(uint16(x.word[w] >> 16));
      }
    }
  }
  REGARD_DEVICE void add_key_sum(const BackwardTask& task, int head) {
    const int j = task.first_key + thread();
    if (j < task.seq.len_k) {
      red_add(params.buffers.dbias_sums + head_offset(task, head) + j * strides().column, key_sum);
    }
    key_sum = 0;
  }

  // -------------------------------------------------------------------------------------- mainloop

  // The warpgroup has read dS^T of this buffer; in a cluster, dS^T of all blocks.
  REGARD_DEVICE void free(int buffer) const {
    const SharedAddress barrier = memory.barrier(Memory::kDscoreEmpty, buffer);
    if constexpr (kCluster) {  // after a named barrier of the warpgroup
      if (warp() == 0 && lane_index() < kConfig.cluster) {
        mbarrier_arrive_cluster(address_in_cluster(barrier, lane_index()));
      }
    } else {
      mbarrier_arrive(barrier);
    }
  }

  // The block's own dS^T is complete; this waits for dS^T of the other blocks.
  REGARD_DEVICE void add(const BackwardTask& task, const RowTile& tile, int iteration) {
    if constexpr (kSumsRows) {
      sum_rows(iteration & 1);
    } else if constexpr (kCluster) {
      memory.await_full(Memory::kPeersFull, iteration);
      put_groups(task, tile, iteration);
    } else {
      put_groups(task, tile, iteration);
    }
    if constexpr (!kCluster) free(iteration & 1);
    if (kSumsRows && tile.index + 1 == task.end_row_tile) add_key_sum(task, tile.head);
  }
  // The mainloop of warpgroup 3.
  REGARD_DEVICE void run() {
    const BackwardTask& task = memory.task();
    clear_unseen(task);
    RowWalk<kConfig> tile = row_walk<kConfig>(params, task);
#pragma unroll 1
    for (int iteration = 0; iteration < task.iterations; ++iteration) {
      if constexpr (!kCluster) {
        memory.await_full(Memory::kDscoreFull, iteration);
      }
      add(task, tile, iteration);
      advance<kConfig>(tile, params, task);
    }
  }

  // dbias is 0 where rows see none of the block's keys. The mainloop leaves these tiles out.
  REGARD_DEVICE void clear_unseen(const BackwardTask& task) const {
    if constexpr (kStores && kConfig.features.interval) {
      if (params.problem.accumulate) return;
      if (kConfig.split_q && task.dkv_head % params.splits > 0) return;  // the first split does it
      const int heads = group_of(params.problem.sizes);
      const int tiles = (task.seq.len_q + kRows - 1) / kRows;
#pragma unroll 1
      for (int h = 0; h < heads; ++h) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          if (tile >= task.first_row_tile && tile < task.end_row_tile) continue;
          clear_tile(task, {key_head<kConfig>(params, task) * heads + h, tile});
        }
      }
    }
  }
  REGARD_DEVICE void clear_tile(const BackwardTask& task, const RowTile& tile) const {
    const Strides& s = strides();
    const int first_row = tile.index * kRows + warp() * 16 + lane_index() / 4;
    const int key = task.first_key + lane_index() % 4 * kLaneKeys;
    const int64 at = head_offset(task, tile.head) + first_row * s.row + key * s.column;
#pragma unroll 1
    for (int n = first_group(); n < end_group(); ++n) {
      const int left = task.seq.len_k - key - n * kGroupKeys;
      const int64 to = at + n * kGroupKeys * s.column;
      if (first_row < task.seq.len_q) put(to, left, {});
      if (first_row + 8 < task.seq.len_q) put(to + 8 * s.row, left, {});
    }
  }
};

}  // namespace regard
