// Tile maps that were made before a call, for its Mask; and whether the call may read them.
#pragma once

#include <memory>
#include <vector>

#include "plan/cuda/plan.hpp"

namespace regard {

// What a tile map depends on, next to the configuration of the kernel that makes it.
struct MapSource {
  Sizes sizes;  // those that the map's layout depends on; the others are 0
  bool packed = false;
  SequenceTable sequences;  // positions: where the order of tiles depends on them
  View mask;
  SpanView row_spans, key_spans;
  MaskParams intervals;  // where the order of tiles depends on them

  bool operator==(const MapSource&) const = default;
};

struct MadeMap {
  KernelConfig config;  // of the kernel that made it
  MapSource source;
  uint64* words = nullptr;  // of the map; null in plans for a chip
};

struct MadeMaps {
  std::vector<MadeMap> all;  // at most one for each pass
};

// The launch that makes the plan's tile map; null without one.
const CudaLaunch* map_launch(const CudaPlan&);

// The map that such a launch makes of the problem.
MadeMap map_of(const Problem&, const KernelConfig&, uint64* words);

// The map that the plan's own launch would make once more; null if there is none. `maps` may be
// null.
const MadeMap* made_map(const Problem&, const CudaPlan&, const MadeMaps* maps);

// Leaves the plan's launch of a map out where the call reads one of these, and notes which map it
// reads.
void explain_made_map(const Problem&, const MadeMaps&, CudaPlan&);

}  // namespace regard
