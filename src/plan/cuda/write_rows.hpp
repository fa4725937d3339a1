// The launch of the kernel that writes rows of one tensor to another (write_rows.cuh).
#pragma once

#include "plan/cuda/plan.hpp"

namespace regard {

// It computes in f64 where one of the types is f64, else in f32.
inline KernelConfig write_rows_config(Type from, Type to) {
  const bool is_wide = from == Type::f64 || to == Type::f64;
  return {.kernel = Kernel::write_rows,
          .family = Family::simt,
          .level = 50,
          .type = is_wide ? Type::f64 : Type::f32,
          .tiling = {.rows = 8, .keys = 0, .warps = 4, .stages = 1}};
}

// rows: at least one, fewer than 2^31 blocks of them.
inline CudaLaunch write_rows_launch(Type from, Type to, int64 rows) {
  const KernelConfig config = write_rows_config(from, to);
  return {.config = config,
          .grid = {.tiles = int32(divide_up(rows, config.tiling.rows))},
          .by = {},
          .threads = config.tiling.warps * 32};
}

}  // namespace regard
