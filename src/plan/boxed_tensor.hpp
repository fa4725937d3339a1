// BoxedTensor: a tensor as Hopper's copy engine sees it, from which it loads boxes; and whether it
// can.
#pragma once

#include "plan/kernel_config.h"
#include "problem/problem.h"

namespace regard {

// Dimensions: column, row, head, batch. A box has one panel of columns and some rows of one head.
struct BoxedTensor {
  const void* data = nullptr;
  Type type = Type::none;
  int64 sizes[4] = {1, 1, 1, 1};
  int64 strides[4] = {0, 0, 0, 0};  // bytes
  int box_columns = 0;
  int box_rows = 0;
};

struct ForwardBoxes {
  BoxedTensor q, k, v, out, bias;
};

struct BackwardBoxes {
  BoxedTensor q, k, v, dout, dk, dv;
};

// Packed sequences are one batch entry. Where the bias is broadcast there is one of it.
ForwardBoxes forward_boxes(const Problem&, const Tiling&);
BackwardBoxes backward_boxes(const Problem&, const Tiling&);

// Of f32: planes of q, k and v in scratch memory, the planes in place of batch entries; no out.
ForwardBoxes plane_boxes(const Problem&, const KernelConfig&, const void* planes);
// The same of the backward pass, and of dout; no dk and dv.
BackwardBoxes plane_gradient_boxes(const Problem&, const KernelConfig&, const void* planes);
// Whether the copy engine can count their rows, and a grid the blocks that make them.
bool has_plane_boxes(const Problem&);

// 16-byte aligned, strides multiples of 16 bytes, above 0 and below 2^40.
bool is_boxable(const BoxedTensor&);

// Whether boxes can be stored to it as well. The copy engine writes whole pieces of 16 bytes: where
// a row ends within one, it would write over what follows.
bool is_boxable_result(const BoxedTensor&);

}  // namespace regard
