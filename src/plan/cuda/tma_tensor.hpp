// TmaTensor: a tensor as Hopper's copy engine sees it, from which it loads tensors; and whether it
// can.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

// Dimensions: column, row, head, batch. A box has one panel of columns and some rows of one head.
struct TmaTensor {
  const void* data = nullptr;
  Type type = Type::none;
  int64 sizes[4] = {1, 1, 1, 1};
  int64 strides[4] = {0, 0, 0, 0};  // bytes
  int tile_columns = 0;
  int tile_rows = 0;
};

struct ForwardTmaTensors {
  TmaTensor q, k, v, out, bias;
};

struct BackwardTmaTensors {
  TmaTensor q, k, v, dout, dk, dv;
};

// Packed sequences are one batch entry. Where the bias is broadcast there is one of it.
ForwardTmaTensors forward_tma_tensors(const Problem&, const Tiling&);
BackwardTmaTensors backward_tma_tensors(const Problem&, const Tiling&);

// Of f32: planes of q, k and v in scratch memory, the planes in place of batch entries; no out.
ForwardTmaTensors forward_hi_lo_tensors(const Problem&, const KernelConfig&, const void* hi_lo);
// The same of the backward pass, and of dout; no dk and dv.
BackwardTmaTensors backward_hi_lo_tensors(const Problem&, const KernelConfig&, const void* hi_lo);
// Whether the copy engine can count their rows, and a grid the blocks that make them.
bool has_hi_lo_tensors(const Problem&);

// 16-byte aligned, strides multiples of 16 bytes, above 0 and below 2^40.
bool is_tma_loadable(const TmaTensor&);

// Whether tensors can be stored to it as well. The copy engine writes whole pieces of 16 bytes:
// where a row ends within one, it would write over what follows.
bool is_tma_storable(const TmaTensor&);

}  // namespace regard
