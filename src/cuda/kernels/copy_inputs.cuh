// Copies of inputs that TMA cannot load: see copy_layout.h.
#pragma once

#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/copy_layout.h"

namespace regard {

// A block's split says which input it copies.
REGARD_DEVICE Input input_of_split(const CudaBuffers& buffers, int split) {
  int found = 0;
#pragma unroll
  for (int n = kInputs - 1; n >= 0; --n) {
    int before = 0;
#pragma unroll
    for (int m = 0; m < n; ++m) before += buffers.copies[m] != nullptr;
    if (buffers.copies[n] && before == split) found = n;
  }
  return Input(found);
}

// A tile of rows of one head. Columns past the last are 0.
template <KernelConfig kConfig>
REGARD_DEVICE void copy_inputs(const KernelParams& params) {
  constexpr int kVector = InputShape::kVector;
  const Problem& p = params.problem;
  const BlockCoords place = block_coords(params, block_index());
  const Input input = input_of_split(params.buffers, place.split);
  const InputShape shape = shape_of(p, input);
  if (place.head >= shape.batch * shape.heads) return;
  const auto [b, h] = batch_head(place.head, shape.heads);
  const int64 first = int64(place.tile) * kConfig.tiling.rows;
  const int rows = int(smaller<int64>(kConfig.tiling.rows, shape.rows - first));
  const int columns = int(shape.columns), vectors = (columns + kVector - 1) / kVector;
  const View& from = view_of(p, input);
  const View to{
      .data = params.buffers.copies[int(input)], .type = kConfig.type, .strides = shape.strides()};
  const int64 begin = offset_of(from.strides, b, h, first, 0);
  const int64 to_begin = offset_of(to.strides, b, h, first, 0);
  const bool aligned = is_aligned(from);
  with_type<kConfig.type>(from.type, [&](auto type) {
#pragma unroll 2
    for (int n = thread_index(); n < rows * vectors; n += kConfig.tiling.warps * 32) {
      const int row = n / vectors, column = (n - row * vectors) * kVector;
      float x[kVector];
      load_vector<decltype(type)::kElement>(x, from, begin + row * from.strides.row + column,
                                            columns - column, aligned);
      store_vector<kConfig.type>(to, to_begin + row * to.strides.row + column, kVector, true, x);
    }
  });
}

}  // namespace regard
