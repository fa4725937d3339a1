// What a Mask holds, and the tensors of a call that say which pairs are visible.
#pragma once

#include <memory>

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

struct MadeMaps;  // plan/cuda/made_maps.hpp

struct MaskContents {
  Tensor mask, row_spans, key_spans;
  Sizes sizes;  // of the calls that it is for; their heads of keys and head sizes may differ
  bool packed = false;
  Device device;
  std::shared_ptr<const MadeMaps> maps{};  // null on the CPU

  static Mask to_mask(MaskContents);
  static const MaskContents* of(const Mask& mask) { return mask.contents_.get(); }
};

// References into the Attention, or into the Mask that it has instead.
struct VisibleTensors {
  const Tensor& mask;
  const Tensor& row_spans;
  const Tensor& key_spans;
};
// Error where both are given.
VisibleTensors visible_tensors(const Attention&);

// Error unless the Mask is for calls of this size, and on this device.
void check_made_for(const Mask&, const Problem&);
void check_made_on(const Mask&, const Device&);

// "cpu", "cuda:0", "sm_80".
std::string to_string(const Device&);

}  // namespace regard
