// The launches that steps of planning add to a draft, and the workspace between them.
#pragma once

#include <initializer_list>

#include "plan/cuda/rule.hpp"

namespace regard {

// Everything after the choice of the main kernel and its tiling.
void add_forward_launches(Draft&);
void add_backward_launches(Draft&);

// A launch of so many tiles of each head (batch times heads). Adds none where there are no blocks;
// refuses where there are more than a grid can have.
void add_launch(Draft&, const KernelConfig&, int64 heads, int64 tiles, int64 splits = 1,
                int64 heads_per_group = 1);

// A launch of a kernel of family simt, with a tiling; the main kernel has its tiling already.
void add_simt_launch(Draft&, KernelConfig, int64 splits = 1);

// The fix-up pass: a simt kernel that computes flagged rows or keys again.
void add_fixup_launch(Draft&, Kernel);

// Whether a result that should be finite can become NaN or infinite: by 0 * NaN of a hidden pair,
// or by infinities and large values that a split into parts does not represent. In a CTA pair, lse
// and delta share a row of terms, so that an infinity of one is multiplied by the other's 0.
bool needs_fixup(const Problem&, const KernelConfig& main);
void explain_fixup(const Because&);

// A workspace of parts of these sizes in bytes; what is not named has none.
struct PartSize {
  WorkspacePart part;
  Count bytes;
};
CudaWorkspace lay_out(std::initializer_list<PartSize>);

inline constexpr int64 kTileCounterBytes = 8;
inline constexpr int64 kAnyFlagBytes = 16;  // nonces of the calls that flagged a row, a key

// The inputs that are copied first; no launch without any.
void add_copies_launch(Draft&);

// Decides whether the main kernel reads a tile map of mask and spans, and says why.
void choose_tile_map(Draft&);
// The kernel that makes the map, and the bytes of the map; none without a map.
void add_map_launch(Draft&);
Count tile_map_bytes(const Draft&);

// f32 on wgmma: the kernel that splits the inputs into hi and lo parts; and the bytes of the parts.
void add_split_launch(Draft&);
Count hi_lo_bytes(const Problem&, const KernelConfig& main);

}  // namespace regard
