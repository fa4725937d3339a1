// Rows of dq, dk and dv that a block of the backward kernel found not finite, computed again by one
// warp each, at the block's end.
//
// Hidden pairs are skipped, not multiplied by 0, so the results are exact on any input. A lane has
// a pair while scores are made, and columns of the results while they are added.
#pragma once

#include "cuda/kernels/tile/mma/backward_tile.cuh"
#include "cuda/kernels/tile/simt/pair_gradient.cuh"

namespace regard {

// One key head of one batch entry, whose rows and keys are all those of a block.
template <KernelConfig kConfig>
struct GradientsAgain {
  static constexpr Type kType = kConfig.type;
  static constexpr int kOwn = (kConfig.dim + 31) / 32;  // columns of a lane: every 32nd
  static constexpr int kOwnV = (kConfig.dim_v + 31) / 32;
  using Head = SimtHead<kConfig>;

  const Problem& p;
  const int b, kv;
  const int group = group_of(p.sizes);
  const Sequence seq = simt_sequence<kConfig>(p, b);
  DropoutCall<kConfig> dropout;

  REGARD_DEVICE GradientsAgain(const Problem& problem, int batch, int key_head)
      : p(problem), b(batch), kv(key_head), dropout(problem) {}

  // A row of a tensor of q's type, or of f32.
  struct Row {
    const void* data;
    Type type;

    REGARD_DEVICE float at(int column) const {
      return type == kType ? real_of<kType>(static_cast<const Stored*>(data)[column])
                           : static_cast<const float*>(data)[column];
    }
    using Stored = typename ElementOf<kType>::Stored;
  };
  REGARD_DEVICE Row row_of(const View& view, int head, int64 first, int i) const {
    const int64 at = offset_of(view.strides, b, head, first, i);
    const int64 size = view.type == kType ? sizeof(typename Row::Stored) : sizeof(float);
    return {static_cast<const uint8*>(view.data) + at * size, view.type};
  }
  REGARD_DEVICE Row query_row(const View& view, int h, int i) const {
    return row_of(view, h, seq.first_q, i);
  }
  REGARD_DEVICE Row key_row(const View& view, int j) const {
    return row_of(view, kv, seq.first_k, j);
  }

  static REGARD_DEVICE float product(const Row& x, const Row& y, int columns) {
    float sum = 0;
#pragma unroll 8
    for (int d = 0; d < columns; ++d) sum = fma_of(x.at(d), y.at(d), sum);
    return sum;
  }
  // A row that sees nothing has out = 0 and takes nothing from dout, whatever that holds.
  REGARD_DEVICE float delta_product(int h, int i) const {
    const Row out = query_row(p.out, h, i), dout = query_row(p.dout, h, i);
    float sum = 0;
#pragma unroll 4
    for (int d = 0; d < int(p.sizes.dim_v); ++d) {
      const float x = out.at(d);
      if (x != 0) sum = fma_of(x, dout.at(d), sum);
    }
    return sum;
  }

  REGARD_DEVICE SimtRowState<float> state_of(int h, int i) const {
    RowInputs<float, kConfig.given_delta> inputs;
    inputs.load(p, seq, b, h, i);
    const RowState<float> state = inputs.state(kConfig.given_delta ? 0.0f : delta_product(h, i));
    return {state.lse, state.delta};
  }

  // The gradients of the lane's pair; of none if it is hidden.
  struct Pair {
    bool visible = false;
    PairGradient<float> gradient = {};
  };
  REGARD_DEVICE Pair pair(const Head& head, const SimtRowState<float>& state, int i, int j) {
    float bias;
    if (!head.visible(i, j, bias)) return {};
    const float raw = product(query_row(p.q, head.h, i), key_row(p.k, j), int(p.sizes.dim));
    const float dweight =
        product(query_row(p.dout, head.h, i), key_row(p.v, j), int(p.sizes.dim_v));
    dropout.forget();
    return {true, pair_gradient<kConfig>(head, state, raw, dweight, bias, i, j, dropout)};
  }

  // sums += weight row.
  template <int kCount>
  static REGARD_DEVICE void add_row(float (&sums)[kCount], const Row& row, float weight,
                                    int columns) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int column = n * 32 + lane_index();
      if (column < columns) sums[n] = fma_of(row.at(column), weight, sums[n]);
    }
  }
  template <int kCount>
  REGARD_DEVICE void write(const View& view, int head, int64 first, int row,
                           const float (&sums)[kCount], float scale, int columns) const {
    const int64 to = offset_of(view.strides, b, head, first, row);
    with_type<kType>(view.type, [&](auto type) {
      constexpr Type kTo = decltype(type)::kElement;
      auto* const data = static_cast<typename ElementOf<kTo>::Stored*>(view.data) + to;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int column = n * 32 + lane_index();
        if (column >= columns) continue;
        const float old = p.accumulate ? real_of<kTo>(data[column]) : 0.0f;
        data[column] = stored_of<kTo>(old + sums[n] * scale);
      }
    });
  }

  // dq of a row.
  REGARD_DEVICE void query(int h, int i) {
    const Head head(p, seq, b, h);
    const SimtRowState<float> state = state_of(h, i);
    const Range keys = range_of(visible_keys(p.mask_params, seq, i));
    float dq[kOwn] = {};
#pragma unroll 1
    for (int first = keys.begin; first < keys.end; first += 32) {
      const int j = first + lane_index();
      const Pair own = j < keys.end ? pair(head, state, i, j) : Pair{};
#pragma unroll 1
      for (uint32 seen = lanes_with(own.visible); seen != 0; seen &= seen - 1) {
        const int n = lowest_bit(seen);
        add_row(dq, key_row(p.k, first + n), shuffle(own.gradient.dproduct, n), int(p.sizes.dim));
      }
    }
    write(p.dq, h, seq.first_q, i, dq, float(p.score.scale), int(p.sizes.dim));
  }

  // dk and dv of a key, of which `flagged` tells what is written.
  REGARD_DEVICE void key(int j, const bool (&flagged)[2]) {
    const Range rows = range_of(visible_queries(p.mask_params, seq, j));
    float dk[kOwn] = {}, dv[kOwnV] = {};
#pragma unroll 1
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
      const Head head(p, seq, b, h);
#pragma unroll 1
      for (int first = rows.begin; first < rows.end; first += 32) {
        const int i = first + lane_index();
        const Pair own = i < rows.end ? pair(head, state_of(h, i), i, j) : Pair{};
#pragma unroll 1
        for (uint32 seen = lanes_with(own.visible); seen != 0; seen &= seen - 1) {
          const int n = lowest_bit(seen);
          add_row(dk, query_row(p.q, h, first + n), shuffle(own.gradient.dproduct, n),
                  int(p.sizes.dim));
          add_row(dv, query_row(p.dout, h, first + n), shuffle(own.gradient.kept_weight, n),
                  int(p.sizes.dim_v));
        }
      }
    }
    if (flagged[int(KeyGradient::dk)]) {
      write(p.dk, kv, seq.first_k, j, dk, float(p.score.scale), int(p.sizes.dim));
    }
    if (flagged[int(KeyGradient::dv)]) write(p.dv, kv, seq.first_k, j, dv, 1, int(p.sizes.dim_v));
  }
};

// Which results of a block are not finite, in its shared memory.
template <KernelConfig kConfig>
struct AgainFlags {
  static constexpr BackwardMmaLayout kLayout = backward_mma_layout(kConfig);
  static constexpr int kThreads = kConfig.tiling.warps * 32;

  static REGARD_DEVICE uint8* at(int byte) {
    return &shared_memory<uint8>() + kLayout.again + byte;
  }
  static REGARD_DEVICE uint8& any() { return *at(0); }
  static REGARD_DEVICE uint8& of_key(int key, KeyGradient gradient) {
    return *at(kAgainHeader + int(gradient) * kConfig.tiling.keys + key);
  }
  // Rows count through the query heads of the block.
  static REGARD_DEVICE uint8& of_row(int row) {
    return *at(kAgainHeader + 2 * kConfig.tiling.keys + row);
  }
  static REGARD_DEVICE void clear() {
    auto* const words = reinterpret_cast<uint32*>(at(0));
    for (int n = thread_index(); n < again_bytes(kConfig) / 4; n += kThreads) words[n] = 0;
  }
  static REGARD_DEVICE void set(uint8& flag) { flag = any() = 1; }
};

// The whole block takes part, after all its results have been written, except what is flagged where
// results are added to what is there.
template <KernelConfig kConfig>
REGARD_COLD void compute_gradients_again(const KernelParams& params, int b, int kv) {
  using Flags = AgainFlags<kConfig>;
  GradientsAgain<kConfig> again(params.problem, b, kv);
  const int group = again.group, rows = int(again.seq.len_q);
  if constexpr (kConfig.wanted.dq) {
#pragma unroll 1
    for (int n = warp_index(); n < group * rows; n += kConfig.tiling.warps) {
      if (Flags::of_row(n) != 0) again.query(kv * group + n / rows, n % rows);
    }
  }
#pragma unroll 1
  for (int j = warp_index(); j < int(again.seq.len_k); j += kConfig.tiling.warps) {
    const bool flagged[2] = {Flags::of_key(j, KeyGradient::dk) != 0,
                             Flags::of_key(j, KeyGradient::dv) != 0};
    if (flagged[0] || flagged[1]) again.key(j, flagged);
  }
}

}  // namespace regard
