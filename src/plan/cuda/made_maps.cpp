// A map serves a call if the call's own launch would write the same words.
#include "plan/cuda/made_maps.hpp"

#include <algorithm>

#include "plan/cuda/kernel/simt_layout.h"
#include "plan/cuda/reasons.hpp"

namespace regard {
namespace {

MapSource source_of(const Problem& p, const KernelConfig& c) {
  const Sizes& s = p.sizes;
  SequenceTable sequences = p.sequences;
  sequences.has_row_positions = false;
  if (!c.features.positions) {
    sequences.positions = {};
    sequences.position_stride = 0;
  }
  return {.sizes = {.batch = s.batch,
                    .heads_q = s.heads_q,
                    .len_q = s.len_q,
                    .len_k = s.len_k,
                    .rows_q = s.rows_q,
                    .rows_k = s.rows_k},
          .packed = p.packed,
          .sequences = sequences,
          .mask = p.mask,
          .row_spans = p.row_spans,
          .key_spans = p.key_spans,
          .intervals = c.tile_order ? p.mask_params : MaskParams{}};
}

bool makes_map(const CudaLaunch& launch) { return makes_tile_map(launch.config.kernel); }

enum class Tables : bool { compared, unknown };

// The map that the launch would make once more; null if there is none.
const MadeMap* found_map(const Problem& p, const CudaLaunch& launch, const MadeMaps& maps,
                         Tables tables) {
  MapSource wanted = source_of(p, launch.config);
  for (const MadeMap& map : maps.all) {
    if (tables == Tables::unknown) wanted.sequences = map.source.sequences;
    if (map.config == launch.config && map.source == wanted) return &map;
  }
  return nullptr;
}

}  // namespace

const CudaLaunch* map_launch(const CudaPlan& plan) {
  const auto found = std::find_if(plan.launches.begin(), plan.launches.end(), makes_map);
  return found == plan.launches.end() ? nullptr : &*found;
}

MadeMap map_of(const Problem& p, const KernelConfig& c, uint64* words) {
  return {.config = c, .source = source_of(p, c), .words = words};
}

const MadeMap* made_map(const Problem& p, const CudaPlan& plan, const MadeMaps* maps) {
  const CudaLaunch* const launch = maps ? map_launch(plan) : nullptr;
  return launch ? found_map(p, *launch, *maps, Tables::compared) : nullptr;
}

// Tables in a GPU's memory are unknown where only an explanation is asked for.
void explain_made_map(const Problem& p, const MadeMaps& maps, CudaPlan& plan) {
  const CudaLaunch* const launch = map_launch(plan);
  if (!launch) return;
  const bool has_tables =
      p.varlen || (launch->config.features.positions && p.sequences.has_row_positions);
  if (!found_map(p, *launch, maps, has_tables ? Tables::unknown : Tables::compared)) {
    plan.reasons.push_back(
        "tile map: made by the call itself; the Mask has none of these tiles and intervals");
    return;
  }
  std::erase_if(plan.launches, makes_map);
  std::erase(plan.reasons, kMapOfSingleBytes);
  plan.reasons.push_back(
      std::string("tile map: that of the Mask, made before the call") +
      (has_tables ? ", where the tables of sequences are those it was made with" : ""));
}

}  // namespace regard
