// Out and lse from the parts of a forward pass that split its keys over blocks.
#pragma once

#include "cuda/kernels/tile/merged_row.cuh"

namespace regard {

// A warp has a few rows; `slices` warps have the same rows, each with its part of the splits.
template <KernelConfig kConfig>
struct Combine {
  using Row = MergedRow<kConfig>;
  static constexpr int kElements = Row::kElements, kLanes = Row::kLanes;
  static constexpr int kSlices = kConfig.tiling.slices, kRowsOfWarp = 32 / kLanes;
  static constexpr int kAtOnce = 8;  // parts on their way
  static_assert(kConfig.tiling.rows * kSlices == kConfig.tiling.warps * kRowsOfWarp);

  const KernelParams& params;
  Row row;
  const int splits = params.splits;
  const int64 dim = row.p.sizes.dim_v, row_count = row.p.sizes.heads_q * row.p.sizes.rows_q;
  const RowPart* const parts =
      reinterpret_cast<const RowPart*>(params.buffers.partial_rows) + row.row_index;
  const View partial{.data = params.buffers.partial_out, .type = Type::f32, .strides = {}};
  const SharedAddress shared = shared_address(&shared_memory<uint8>());

  // The row's reference and sum, in every warp.
  REGARD_DEVICE void weigh() {
    row.see_sink();
#pragma unroll 4
    for (int s = row.lane; s < splits; s += kLanes) row.see(parts[s * row_count].reference);
    row.largest = max_of_lanes<kLanes>(row.largest);
#pragma unroll 4
    for (int s = row.lane; s < splits; s += kLanes) row.add(parts[s * row_count]);
    row.total = sum_of_lanes<kLanes>(row.total);
    row.add_sink();
  }

  static REGARD_DEVICE int slice() { return warp_index() % kSlices; }

  // Adds columns [d, d + kElements) of this warp's splits.
  REGARD_DEVICE void add_splits(float (&sums)[kElements], int64 d) const {
    for (int first = slice(); first < splits; first += kSlices * kAtOnce) {
      float x[kAtOnce][kElements];
      RowPart part[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int s = first + n * kSlices;
        const int64 from = smaller(s, splits - 1) * row_count;
        part[n] = parts[from];
        load_vector<Type::f32>(x[n], partial, (from + row.row_index) * dim + d, dim - d,
                               dim % kElements == 0);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * kSlices >= splits || !has_values(part[n])) continue;
        const float weight = row.weight_of(part[n].reference);
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] = fma_of(x[n][e], weight, sums[e]);
      }
    }
  }

  REGARD_DEVICE SharedAddress sums_of(int warp) const {
    return shared + (warp * 32 + lane_index()) * int(sizeof(Bits128));
  }

  // Adds the sums of the other slices, in the warp of the first.
  REGARD_DEVICE void add_slices(float (&sums)[kElements]) const {
    sync_block();  // the previous columns have been read
    store_shared_128(sums_of(warp_index()),
                     {{bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])}});
    sync_block();
    if (slice() != 0) return;
    for (int other = 1; other < kSlices; ++other) {
      const Bits128 more = load_shared_128(sums_of(warp_index() + other));
#pragma unroll
      for (int e = 0; e < kElements; ++e) sums[e] += float_of(more.word[e]);
    }
  }

  REGARD_DEVICE void run_continued() {
    constexpr int kAtOnceColumns = kLanes * kElements;
    constexpr int kParts = (kConfig.dim_v + kAtOnceColumns - 1) / kAtOnceColumns;
    weigh();
    float sums[kParts][kElements] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64 d = part * kAtOnceColumns + row.lane * kElements;
      if (d < dim) add_splits(sums[part], d);
      if constexpr (kSlices > 1) add_slices(sums[part]);
    }
    if (slice() == 0) row.write_continued(sums);
  }

  REGARD_DEVICE void run() {
    weigh();
    for (int64 begin = 0; begin < dim; begin += kLanes * kElements) {
      const int64 d = begin + row.lane * kElements;
      float sums[kElements] = {};
      if (d < dim) add_splits(sums, d);
      if constexpr (kSlices > 1) add_slices(sums);
      if (slice() == 0 && d < dim) row.write_columns(d, sums);
    }
    if (slice() == 0) row.write_end();
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void combine(const KernelParams& params) {
  using Row = MergedRow<kConfig>;
  const Problem& p = params.problem;
  const BlockCoords place = block_coords(params, block_index());
  const auto [b, h] = batch_head(place.head, p.sizes.heads_q);
  const Sequence seq = safe_sequence(p, b);
  const int64 first = int64(place.tile) * kConfig.tiling.rows;
  if (first >= seq.len_q) return;
  // Threads past the last row repeat its work, and write nothing.
  const int64 index = first + warp_index() / kConfig.tiling.slices * (32 / Row::kLanes) +
                      lane_index() / Row::kLanes;
  Combine<kConfig> block{params,
                         Row(params, seq, b, h, smaller(index, seq.len_q - 1), index < seq.len_q)};
  if constexpr (kConfig.continues) {
    block.run_continued();
  } else {
    block.run();
  }
}

}  // namespace regard
