// Copies tiles of a mask to shared memory: bytes, at any alignment.
#pragma once

#include "cuda/kernels/tile/copy.cuh"

namespace regard {

// Gathers 16 bytes, `step` apart, from `from` on. Only `left` of them exist; the others become 0.
// `before` bytes of the same row precede `from`.
REGARD_DEVICE Bits128 gather_bytes(const uint8* from, int64 step, int before, int left) {
  Bits128 x = {};
  const int skipped = int(reinterpret_cast<uint64>(from) % 4);
  if (step == 1 && skipped <= before && skipped + left >= 20) {
    // From the aligned words that contain them, all within the row.
    const auto* const words = reinterpret_cast<const uint32*>(from - skipped);
    uint32 low = words[0];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32 high = words[w + 1];
      x.word[w] = uint32(((uint64(high) << 32) | low) >> (skipped * 8));
      low = high;
    }
    return x;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < left) x.word[i / 4] |= uint32(from[i * step]) << (i % 4 * 8);
  }
  return x;
}

// Copies a tile of kRows x kColumns bytes, `step` apart in memory, by kThreads threads, of which
// `thread` is this one's number. `from` has row(r), as RowsInMemory has, and `first` columns
// precede the tile. Rows from `rows` on and columns from `columns` on are cleared and not read.
// Copies of kCopy = 16, 8 or 4 aligned bytes are asynchronous (cp_async_commit, cp_async_wait);
// otherwise the tile is there after a barrier.
template <int kThreads, int kRows, int kColumns, int kCopy, class From>
REGARD_DEVICE void load_mask_tile(const TileView& tile, int rows, int columns, int first,
                                  int64 step, const From& from, int thread = thread_index()) {
  constexpr bool kAligned = kCopy >= 4;
  constexpr int kChunk = kAligned ? kCopy : 16;
  constexpr int kChunks = kColumns / kChunk, kCount = kRows * kChunks;
#pragma unroll
  for (int i = 0; i * kThreads < kCount; ++i) {
    const int index = i * kThreads + thread;
    if (kCount % kThreads != 0 && index >= kCount) break;
    const int row = index / kChunks, column = index % kChunks * kChunk;
    const int left = row < rows ? larger(columns - column, 0) : 0;
    const SharedAddress to = tile.begin + row * tile.row_bytes + column;
    const uint8* const bytes = left > 0 ? from.row(row) + column * step : nullptr;
    if constexpr (kAligned) {
      cp_async<kChunk>(to, bytes, smaller(left, kChunk));
    } else {
      store_shared_128(to, left > 0 ? gather_bytes(bytes, step, first + column, left) : Bits128{});
    }
  }
}

}  // namespace regard
