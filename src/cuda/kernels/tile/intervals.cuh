// What intervals show to the rows and keys of a sequence, whose rows may have positions.
#pragma once

#include "cuda/kernels/params.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "semantics/mask.h"

namespace regard {

// A Sequence in 32 bits, which hold every length and row index.
struct ShortSequence {
  int len_q, len_k;
  int first_q, first_k;

  REGARD_DEVICE Sequence whole() const { return {len_q, len_k, first_q, first_k}; }
};

template <KernelConfig kConfig>
REGARD_DEVICE ShortSequence short_sequence(const Problem& p, int64 b) {
  if constexpr (!kConfig.varlen) return {int(p.sizes.len_q), int(p.sizes.len_k), 0, 0};
  const Sequence s = safe_sequence(p, b);
  return {int(s.len_q), int(s.len_k), int(s.first_q), int(s.first_k)};
}

// An Interval in 32 bits.
struct ShortInterval {
  int begin, end;
};

// split_kv: the share of tiles that a block has, as even as possible; the first splits have one
// tile more.
REGARD_DEVICE ShortInterval tiles_of_split(const ShortInterval& tiles, int splits, int split) {
  const int count = larger(tiles.end - tiles.begin, 0);
  const int each = count / splits, more = count - each * splits;
  const int begin = tiles.begin + split * each + smaller(split, more);
  return {begin, begin + each + (split < more ? 1 : 0)};
}

// ------------------------------------------------------------------------------------- positions

template <KernelConfig kConfig>
REGARD_DEVICE Positions kernel_positions(const Problem& p, int64 b) {
  if constexpr (kConfig.features.positions) return positions_of(p.sequences, b);
  return {};
}
template <KernelConfig kConfig>
REGARD_DEVICE Sequence with_positions(const Problem& p, const ShortSequence& seq, int64 b) {
  Sequence whole = seq.whole();
  whole.positions = kernel_positions<kConfig>(p, b);
  return whole;
}

// The keys that a row sees, and the rows that see a key.
template <KernelConfig kConfig>
REGARD_DEVICE Interval keys_of_row(const Problem& p, const ShortSequence& seq, int b, int64 i) {
  return visible_keys(p.mask_params, with_positions<kConfig>(p, seq, b), i);
}
template <KernelConfig kConfig>
REGARD_DEVICE Interval rows_of_key(const Problem& p, const ShortSequence& seq, int b, int64 j) {
  return visible_queries(p.mask_params, with_positions<kConfig>(p, seq, b), j);
}

// The Philox numbers of a query head's row and of the keys of a call.
template <KernelConfig kConfig>
REGARD_DEVICE Philox dropout_counter_of(const Problem& p, int b, int h, int i, uint32 call) {
  if constexpr (!kConfig.features.positions) return dropout_counter(b, h, i, call);
  const Positions at = positions_of(p.sequences, b);
  return dropout_counter(b + at.first_batch, h + at.first_head, at.of_row(i),
                         call + dropout_call(at.first_key));
}
template <KernelConfig kConfig>
REGARD_DEVICE Philox dropout_bits_of(const Problem& p, const DropoutParams& dropout, int b, int h,
                                     int i, uint32 call) {
  Philox counters[1] = {dropout_counter_of<kConfig>(p, b, h, i, call)};
  draw_dropout(dropout, counters);
  return counters[0];
}

// ------------------------------------------------------------------------------------------ bands

// visible_keys of rows [0, len_q) in 32 bits: each end is the row index plus a constant, cut to [0,
// len_k].
struct IndexBand {
  struct End {
    int shift;  // in [-len_q, len_k]
    int rows;   // those behind are cut

    REGARD_DEVICE End(int64 wanted, int len_q, int len_k)
        : shift(int(clamp_to<int64>(wanted, -len_q, len_k))),
          rows(int(smaller<int64>(int64(len_k) - shift, kMostRows))) {}
    REGARD_DEVICE int of(int i) const { return larger(smaller(i, rows) + shift, 0); }
  };
  static constexpr int64 kMostRows = 0x7fffffff;
  const End begin, end;

  REGARD_DEVICE IndexBand(const MaskParams& mask, int len_q, int len_k)
      : begin(mask.left < 0 ? -len_q : diagonal_shift(mask, len_q, len_k) - mask.left, len_q,
              len_k),
        end(mask.right < 0 ? len_k : diagonal_shift(mask, len_q, len_k) + mask.right + 1, len_q,
            len_k) {}
  REGARD_DEVICE int begin_of(int i) const { return begin.of(i); }
  REGARD_DEVICE int end_of(int i) const { return end.of(i); }
  REGARD_DEVICE ShortInterval keys_of(int i) const { return {begin.of(i), end.of(i)}; }
};
// The same of rows with positions.
struct PositionBand {
  const MaskParams& mask;
  const Sequence seq;

  REGARD_DEVICE int begin_of(int i) const { return int(visible_keys(mask, seq, i).begin); }
  REGARD_DEVICE int end_of(int i) const { return int(visible_keys(mask, seq, i).end); }
  REGARD_DEVICE ShortInterval keys_of(int i) const { return {begin_of(i), end_of(i)}; }
};
template <KernelConfig kConfig>
REGARD_DEVICE auto band_of(const Problem& p, const ShortSequence& seq, int b) {
  if constexpr (kConfig.features.positions) {
    return PositionBand{p.mask_params, with_positions<kConfig>(p, seq, b)};
  } else {
    return IndexBand(p.mask_params, seq.len_q, seq.len_k);
  }
}

// The tiles of rows that are visible to a tile of keys, or to kKeyTiles neighbouring ones, as far
// as intervals say.
template <KernelConfig kConfig, int kKeyTiles = 1>
REGARD_DEVICE ShortInterval row_tiles_of_keys(const Problem& p, const ShortSequence& seq, int b,
                                              int key_tile) {
  constexpr int kRows = kConfig.tiling.rows, kKeys = kKeyTiles * kConfig.tiling.keys;
  static_assert(kPositionBlock % kRows == 0, "pairs of a tile differ in position by constants");
  Interval rows{0, seq.len_q};
  if constexpr (kConfig.features.interval) {
    const int first = key_tile * kKeys, last = smaller(first + kKeys, seq.len_k) - 1;
    rows = {rows_of_key<kConfig>(p, seq, b, first).begin,
            rows_of_key<kConfig>(p, seq, b, last).end};
  }
  if (rows.empty()) return {0, 0};
  return {int(rows.begin) / kRows, int(divide_up(rows.end, kRows))};
}

}  // namespace regard
