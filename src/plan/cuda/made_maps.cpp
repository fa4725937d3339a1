// A map serves a call if the call's own launch would write the same words.
#include "plan/cuda/made_maps.hpp"

#include <algorithm>

#include "plan/cuda/kernel/simt_layout.h"

namespace regard {
namespace {

MapSource source_of(const Problem& p, const KernelConfig& c) {
  const Sizes& s = p.sizes;
  return {.sizes = {.batch = s.batch,
                    .heads_q = s.heads_q,
                    .len_q = s.len_q,
                    .len_k = s.len_k,
                    .rows_q = s.rows_q,
                    .rows_k = s.rows_k},
          .packed = p.packed,
          .sequences = p.sequences,
          .mask = p.mask,
          .row_spans = p.row_spans,
          .key_spans = p.key_spans,
          .intervals = c.tile_order ? p.mask_params : MaskParams{}};
}

bool makes_map(const CudaLaunch& launch) { return makes_tile_map(launch.config.kernel); }

// Where only an explanation is asked for, a problem has no tables: it is taken to have the map's.
bool is_same(const MapSource& made, MapSource wanted) {
  const SequenceTable& t = wanted.sequences;
  if (!t.begins_q && !t.begins_k && !t.used_q && !t.used_k) wanted.sequences = made.sequences;
  return made == wanted;
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
  if (!launch) return nullptr;
  const MapSource wanted = source_of(p, launch->config);
  const auto found = std::find_if(maps->all.begin(), maps->all.end(), [&](const MadeMap& map) {
    return map.config == launch->config && is_same(map.source, wanted);
  });
  return found == maps->all.end() ? nullptr : &*found;
}

void explain_made_map(const Problem& p, const MadeMaps& maps, CudaPlan& plan) {
  if (!map_launch(plan)) return;
  if (made_map(p, plan, &maps)) {
    std::erase_if(plan.launches, makes_map);
    plan.reasons.push_back("tile map: that of `visible`, which make_mask made");
  } else {
    plan.reasons.push_back(
        "tile map: made by the call itself; `visible` has none of these tiles and intervals");
  }
}

}  // namespace regard
