// Copies tiles from global to shared memory, and back.
#pragma once

#include "cuda/kernels/tile/fragment.cuh"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {

// The rows of a tile in memory: the first, and the bytes from row to row.
struct RowsInMemory {
  const uint8* first;
  int64 stride;

  REGARD_DEVICE const uint8* row(int r) const { return first + r * stride; }
};

// 16 bytes of a tile, of which `left` exist (the others are cleared and not read).
template <int kBytes, bool kAligned>
REGARD_DEVICE void load_chunk(SharedAddress to, const uint8* from, int left) {
  if constexpr (kAligned) {
    cp_async<16>(to, from, left);
  } else {
    Bits128 x = {};
#pragma unroll
    for (int i = 0; i < 16 / kBytes; ++i) {
      if (i * kBytes >= left) continue;
      if constexpr (kBytes == 4) {
        x.word[i] = reinterpret_cast<const uint32*>(from)[i];
      } else {
        x.word[i / 2] |= uint32(reinterpret_cast<const uint16*>(from)[i]) << (i % 2 * 16);
      }
    }
    store_shared_128(to, x);
  }
}

// Copies a tile of kRows x kColumns elements of kBytes each, by kThreads threads, of which `thread`
// is this one's number. Rows from `rows` on and columns from `columns` on are cleared and not read;
// kExact: no column is missing. `from` has row(r), as RowsInMemory has. With kAligned the copies
// are asynchronous (cp_async_commit, cp_async_wait); without, the tile is there after a barrier.
template <int kThreads, int kRows, int kColumns, int kBytes, bool kAligned, bool kExact, class From>
REGARD_DEVICE void load_tile(const TileView& tile, int rows, int columns, const From& from,
                             int thread = thread_index()) {
  constexpr int kPerChunk = 16 / kBytes;
  constexpr int kChunks = (kColumns + kPerChunk - 1) / kPerChunk;
  constexpr int kCount = kRows * kChunks;
#pragma unroll
  for (int i = 0; i * kThreads < kCount; ++i) {
    const int index = i * kThreads + thread;
    if (kCount % kThreads != 0 && index >= kCount) break;
    const int row = index / kChunks, column = index % kChunks * kPerChunk;
    const int left = kExact ? 16 : clamp_to((columns - column) * kBytes, 0, 16);
    const int some = row < rows ? left : 0;
    load_chunk<kBytes, kAligned>(tile.at(row, column * kBytes),
                                 some > 0 ? from.row(row) + column * kBytes : nullptr, some);
  }
}

// The same for rows at a constant stride, in less code: a thread has the same columns of every row
// that it copies, and addresses grow by a constant. Threads that are left over have nothing to do.
template <int kThreads, int kRows, int kColumns, int kBytes, bool kAligned, bool kExact>
REGARD_DEVICE void load_tile_in_steps(const TileView& tile, int rows, int columns,
                                      const RowsInMemory& from, int thread) {
  if constexpr (!kAligned) {
    load_tile<kThreads, kRows, kColumns, kBytes, kAligned, kExact, RowsInMemory>(
        tile, rows, columns, from, thread);
  } else {
    constexpr int kChunks = (kColumns * kBytes + 15) / 16;
    constexpr int kPerRow = smaller(kChunks, kThreads);
    constexpr int kEach = (kChunks + kPerRow - 1) / kPerRow, kStep = kThreads / kPerRow;
    const int row = thread / kPerRow, lane = thread % kPerRow;
    if (kStep * kPerRow != kThreads && row >= kStep) return;
    const SharedAddress to = tile.at(row, lane * 16);
    const uint8* next = from.row(row) + lane * 16;
    int left[kEach];  // bytes of a chunk that exist
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      left[n] = kExact ? 16 : clamp_to(columns * kBytes - (lane + n * kPerRow) * 16, 0, 16);
    }
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      if (kRows % kStep != 0 && row + r >= kRows) break;
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        if ((n + 1) * kPerRow > kChunks && lane + n * kPerRow >= kChunks) continue;
        cp_async<16>(tile.after(to, row, r, lane * 16) + n * kPerRow * 16, next + n * kPerRow * 16,
                     row + r < rows ? left[n] : 0);
      }
      next += kStep * from.stride;
    }
  }
}

// The same, with one path more if all rows and columns exist: copies without conditions.
template <int kThreads, int kRows, int kColumns, int kBytes, bool kAligned, bool kExact>
REGARD_DEVICE void load_tile(const TileView& tile, int rows, int columns,
                             const RowsInMemory& from) {
  constexpr int kPerChunk = 16 / kBytes;
  constexpr int kChunks = (kColumns + kPerChunk - 1) / kPerChunk;
  constexpr int kStep = kThreads / kChunks;
  constexpr bool kSteps = kAligned && kExact && kThreads % kChunks == 0 && kRows % kStep == 0;
  if (kSteps && rows >= kRows) {
    const int row = thread_index() / kChunks, bytes = thread_index() % kChunks * 16;
    const SharedAddress to = tile.at(row, bytes);
    const uint8* next = from.row(row) + bytes;
    const int64 step = kStep * from.stride;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      cp_async<16>(tile.after(to, row, r, bytes), next);
      next += step;
    }
    return;
  }
  load_tile_in_steps<kThreads, kRows, kColumns, kBytes, kAligned, kExact>(tile, rows, columns, from,
                                                                          thread_index());
}

// Writes 16 rows of a result from accumulators to global memory, by one warp. row_at(r) is the
// offset in view.data of row r's first column; rows without row_exists(r) are not written. Results
// go through `stage`, the warp's own shared memory for 16 rows of kBlocks blocks of the type, so
// that memory is written in whole cache lines.
template <Type kType, int kBlocks, class RowAt, class RowExists>
REGARD_DEVICE void store_rows(const Accumulator (&x)[kBlocks], const View& view, int columns,
                              bool accumulate, const TileView& stage, RowAt row_at,
                              RowExists row_exists) {
  using Direct = Fragments<kType, Products::direct>;
  constexpr int kPerChunk = 16 / Direct::kBytes;
  constexpr int kChunks = kBlocks * 8 / kPerChunk;
  const bool whole = view.type == kType && !accumulate && columns % kPerChunk == 0 &&
                     reinterpret_cast<uint64>(view.data) % 16 == 0 &&
                     (view.strides.row | view.strides.head | view.strides.batch) % kPerChunk == 0;
  if (whole) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) Direct::store(stage, 0, n * 8, x[n]);
    sync_warp();
#pragma unroll 4
    for (int index = lane_index(); index < 16 * kChunks; index += 32) {
      const int row = index / kChunks, column = index % kChunks * kPerChunk;
      if (column >= columns || !row_exists(row)) continue;
      store_global_128(static_cast<uint8*>(view.data) + (row_at(row) + column) * Direct::kBytes,
                       load_shared_128(stage.begin + row * stage.row_bytes + index % kChunks * 16));
    }
    sync_warp();
    return;
  }
  // Through f32, element by element; the stage holds this many blocks at a time.
  using Wide = Fragments<Type::f32, Products::direct>;
  constexpr int kAtOnce = kBlocks * Direct::kBytes / 4;
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) Wide::store(stage, 0, n * 8, x[first + n]);
    sync_warp();
#pragma unroll 1
    for (int index = lane_index(); index < 16 * kAtOnce * 8; index += 32) {
      const int row = index / (kAtOnce * 8), column = first * 8 + index % (kAtOnce * 8);
      if (column >= columns || !row_exists(row)) continue;
      const int64 at = row_at(row) + column;
      float value =
          float_of(load_shared_32(stage.begin + row * stage.row_bytes + index % (kAtOnce * 8) * 4));
      if (accumulate) value += load_element<float>(view.data, view.type, at);
      store_element(view.data, view.type, at, value);
    }
    sync_warp();
  }
}

}  // namespace regard
