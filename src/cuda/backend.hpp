// Runs the GPU's plans: enqueues on the caller's stream, and returns.
#pragma once

#include <string>

#include "plan/cuda/chip.hpp"
#include "plan/cuda/made_maps.hpp"
#include "plan/cuda/plan.hpp"
#include "regard/regard.hpp"

namespace regard::cuda_backend {

// The device as plans see it; an Error where there is none.
const Chip& this_chip(int device);

// What a family's kernels lack on this machine, and how to get it; "" = nothing.
std::string missing(Family);

// maps: those of the call's Mask, or null.
void run(const Problem&, const MadeMaps* maps, const Run&);

// "registers 168, shared 0 + 98304, ..." for each kernel that is at hand without compiling.
std::string resources_text(const CudaPlan&, const Chip&);

}  // namespace regard::cuda_backend
