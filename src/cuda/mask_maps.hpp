// The tile maps of a Mask: how much memory they take, and the launches that make them.
#pragma once

#include <memory>

#include "plan/cuda/made_maps.hpp"
#include "regard/regard.hpp"

namespace regard::cuda_backend {

// Bytes of the maps for a forward call and the backward call after it; 0 where neither reads one.
int64 mask_memory(const Problem& forward, const Run&);

// Puts the kernels that make the maps on the stream; on a chip, none.
std::shared_ptr<const MadeMaps> make_maps(const Problem& forward, const Workspace&, const Run&);

}  // namespace regard::cuda_backend
