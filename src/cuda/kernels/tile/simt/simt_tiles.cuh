// Which tiles a block of a simt kernel computes: its own, or (fix-up pass) the flagged ones of
// many.
#pragma once

#include "cuda/kernels/tile/simt/simt_pairs.cuh"

namespace regard {

// A tile of rows of one query head, or of keys of one kv head: those from `first` up to `end`.
template <KernelConfig kConfig>
struct OwnTile {
  static constexpr bool kOfKeys = kConfig.kernel == Kernel::key_gradient;
  static constexpr int kResults = kOfKeys ? 2 : 1;  // flags of a row; a key has two

  int32 b, h;
  Sequence seq;
  int64 first, end;
  const uint8* flags;  // [rows][kResults]

  REGARD_DEVICE OwnTile(const KernelParams& params, int64 head, int64 tile) {
    constexpr int kOwn = SimtTile<kConfig>::kOwn;
    const Problem& p = params.problem;
    const BatchHead at = batch_head(int32(head), kOfKeys ? p.sizes.heads_kv : p.sizes.heads_q);
    b = int32(at.b);
    h = int32(at.h);
    seq = simt_sequence<kConfig>(p, b);
    first = tile * kOwn;
    end = smaller(first + kOwn, kOfKeys ? seq.len_k : seq.len_q);
    flags = kOfKeys ? params.buffers.flags_k +
                          (h * p.sizes.rows_k + flat_key(p, seq, b, first)) * kResults
                    : params.buffers.flags_q + h * p.sizes.rows_q + flat_row(p, seq, b, first);
  }
  // Whether some result of a row is flagged.
  REGARD_DEVICE bool flagged(int64 row) const {
    const uint8* const of_row = flags + row * kResults;
    return first + row < end && (of_row[0] | of_row[kResults - 1]) != 0;
  }
  // Whether to write a result of a row; for a key, `result` is a KeyGradient.
  REGARD_DEVICE bool writes(int64 row, int result = 0) const {
    return first + row < end && (!kConfig.only_flagged || flags[row * kResults + result] != 0);
  }
};

// Calls compute(OwnTile) for those of the block's kFlaggedTiles tiles that have a flagged row.
template <KernelConfig kConfig, class Compute>
REGARD_DEVICE void each_flagged_tile(const KernelParams& params, int64 block, Compute compute) {
  constexpr int kOwn = SimtTile<kConfig>::kOwn;
  if (!has_flags(params, OwnTile<kConfig>::kOfKeys)) return;
  const int64 tiles = simt_own_tiles(params.problem, kConfig);
  const int64 begin = block * kFlaggedTiles;
  const int64 all = tiles * simt_own_heads(params.problem, kConfig);
  const int count = int(smaller<int64>(kFlaggedTiles, all - begin));
  bool flagged = false;
#pragma unroll 2
  for (int n = thread_index(); n < count * kOwn; n += kSimtThreads) {
    const int64 tile = begin + n / kOwn;
    flagged = flagged || OwnTile<kConfig>(params, tile / tiles, tile % tiles).flagged(n % kOwn);
  }
  if (!any_in_block(flagged)) return;
  for (int n = 0; n < count; ++n) {
    const OwnTile<kConfig> own(params, (begin + n) / tiles, (begin + n) % tiles);
    if (any_in_block(thread_index() < kOwn && own.flagged(thread_index()))) compute(own);
  }
}

// Calls compute(OwnTile) for each tile of the block that exists and, in a fix-up kernel, has a
// flagged row.
template <KernelConfig kConfig, class Compute>
REGARD_DEVICE void each_own_tile(const KernelParams& params, Compute compute) {
  if constexpr (!kConfig.only_flagged) {
    const BlockCoords place = block_coords(params, block_index());
    const OwnTile<kConfig> own(params, place.head, place.tile);
    if (own.first < own.end) compute(own);
  } else {
    each_flagged_tile<kConfig>(params, block_index(), compute);
  }
}

}  // namespace regard
