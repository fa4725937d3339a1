// TmaTensor: a tensor as TMA sees it, and whether TMA can load or store it.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

// Dimensions: column, row, head, batch. A TMA tile is 64 columns of some rows of one head.
struct TmaTensor {
  const void* data = nullptr;
  Type type = Type::none;
  int64 sizes[4] = {1, 1, 1, 1};
  int64 strides[4] = {0, 0, 0, 0};  // bytes
  int tile_columns = 0;
  int tile_rows = 0;
};

// A forward kernel has q, k, v, out and bias; a backward kernel has q, k, v, dout, dk and dv.
struct TmaTensors {
  TmaTensor q, k, v, out{}, bias{}, dout{}, dk{}, dv{};
};

// Packed sequences are one batch entry. A dimension that the bias is broadcast over has size 1.
TmaTensors tma_tensors(const Problem&, const Tiling&);

// The tensors of a wgmma kernel. For f32 they are the hi and lo parts of the inputs, which take the
// place of batch entries; hi_lo: where the parts begin in the workspace.
TmaTensors tma_tensors(const Problem&, const KernelConfig&, const void* hi_lo);

// Whether TMA can count the rows of the parts of f32, and a grid the blocks that make them.
bool has_hi_lo_tensors(const Problem&);

// 16-byte aligned, strides multiples of 16 bytes, above 0 and below 2^40.
bool is_tma_loadable(const TmaTensor&);

// TMA stores whole pieces of 16 bytes: where a row ends within one, it would write over what
// follows.
bool is_tma_storable(const TmaTensor&);

}  // namespace regard
