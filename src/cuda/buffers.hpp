// The parts of a workspace as the kernels take them.
#pragma once

#include "cuda/kernels/params.h"
#include "plan/cuda/plan.hpp"

namespace regard {

// at(part): where a part of the workspace begins, as a void*.
template <class At>
CudaBuffers buffers_at(At at) {
  CudaBuffers b;
  const auto set = [&]<class T>(T*& to, WorkspacePart part) { to = static_cast<T*>(at(part)); };
  set(b.tile_counter, WorkspacePart::tile_counter);
  set(b.dq_semaphores, WorkspacePart::dq_semaphores);
  set(b.any_flag, WorkspacePart::any_flag);
  set(b.flags_q, WorkspacePart::flags_q);
  set(b.flags_k, WorkspacePart::flags_k);
  set(b.dbias_sums, WorkspacePart::dbias_sums);
  set(b.row_states, WorkspacePart::row_states);
  set(b.row_terms, WorkspacePart::row_terms);
  set(b.dq_sums, WorkspacePart::dq_sums);
  set(b.partial_out, WorkspacePart::partial_out);
  set(b.partial_rows, WorkspacePart::partial_rows);
  set(b.arrivals, WorkspacePart::arrivals);
  set(b.tile_map, WorkspacePart::tile_map);
  set(b.hi_lo, WorkspacePart::hi_lo);
  return b;
}

}  // namespace regard
