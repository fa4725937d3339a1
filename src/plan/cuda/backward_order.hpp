// The order in which the blocks of a backward pass begin, and in which wgmma's walk over rows.
#pragma once

#include "plan/cuda/families.hpp"

namespace regard {

// Tiles of a head's keys; even where blocks form pairs.
int64 key_tiles(const KernelConfig&, int64 len_k);

// Whether some keys of the longest sequence are seen by many more rows than others.
bool is_uneven(const Problem&);

// Whether blocks of wgmma that are not split take a tile of rows of all query heads of a key head
// before the next tile of rows: as far as the problem says.
bool is_for_rows_outer(const Problem&);
// The key heads of such blocks that are interleaved.
int64 heads_of_rows_outer(int64 heads, int64 tiles, int64 multiprocessors);

// How many heads are interleaved.
int64 heads_per_group(const Facts&, const KernelConfig&);

}  // namespace regard
