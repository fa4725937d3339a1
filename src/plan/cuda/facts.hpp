// What the planner of GPUs asks of a problem and a chip; no answer costs more than a few divisions.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "plan/cuda/chip.hpp"
#include "plan/cuda/kernel/kernel_config.h"
#include "plan/cuda/kernel/mma_layout.h"
#include "problem/problem.h"
#include "regard/tensor.hpp"

namespace regard {

inline constexpr int64 kLargestGpuHead = 512;
inline constexpr int64 kReservedShared = 1024;             // bytes of each block's, for the system
inline constexpr int64 kMostGpuLength = INT32_MAX - 1023;  // the end of a tile is an int as well

inline int level_of(const Chip& chip) {
  const int capability = chip.capability();
  return capability >= 90 ? 90 : capability >= 80 ? 80 : capability >= 75 ? 75 : 50;
}

// Whether every row begins at a multiple of 16 bytes. Null data, in a plan without memory, does.
inline bool begins_at_16(const View& view,
                         std::initializer_list<std::pair<int64, int64>> sizes_strides) {
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  const int64 size = int64(size_of(view.type));
  for (const auto& [extent, stride] : sizes_strides) {
    if (extent > 1 && stride * size % 16 != 0) return false;
  }
  return true;
}

inline bool rows_begin_at_16(const View& view, int64 batch, int64 heads, int64 rows) {
  const Strides& s = view.strides;
  return begins_at_16(view, {{batch, s.batch}, {heads, s.head}, {rows, s.row}});
}

inline bool is_aligned(const Problem& p) {
  const Sizes& s = p.sizes;
  const int64 rows_q = p.packed ? s.rows_q : s.len_q, rows_k = p.packed ? s.rows_k : s.len_k;
  return rows_begin_at_16(p.q, s.batch, s.heads_q, rows_q) &&
         rows_begin_at_16(p.k, s.batch, s.heads_kv, rows_k) &&
         rows_begin_at_16(p.v, s.batch, s.heads_kv, rows_k) &&
         (!p.dout.given() || rows_begin_at_16(p.dout, s.batch, s.heads_q, rows_q));
}

// The batch entries that read one bias and add to one gradient: they run while it is in the cache.
inline int64 batch_of_bias(const Problem& p) {
  return p.features.bias && p.bias_sizes[0] == 1 && p.bias_sizes[2] > 1
             ? larger<int64>(1, p.sizes.batch)
             : 1;
}

// Whether tiles of the bias can be copied 16 bytes at a time.
inline bool is_bias_aligned(const Problem& p) {
  if (!p.features.bias || p.bias.type == Type::f64) return false;
  const Strides& s = p.bias.strides;
  const int64* sizes = p.bias_sizes;
  return sizes[3] > 1 && s.column == 1 &&
         begins_at_16(p.bias, {{sizes[0], s.batch}, {sizes[1], s.head}, {sizes[2], s.row}});
}

// Whether all rows of a tile share one row of the bias, in which neighbouring keys are neighbours
// in memory. A tile of packed GQA has rows of several heads.
inline bool is_bias_of_keys(const Problem& p, bool pack_gqa) {
  const Strides& s = p.bias.strides;
  return p.features.bias && p.bias.type != Type::f64 && s.column == 1 && s.row == 0 &&
         (!pack_gqa || s.head == 0);
}
inline bool is_mask_of_keys(const Problem& p, bool pack_gqa) {
  const Strides& s = p.mask.strides;
  return p.features.mask && s.row == 0 && (!pack_gqa || s.head == 0);
}

// The bytes of a tile's row of the mask that can be copied at once: 16, 8, 4, or 1.
inline int bytes_of_mask_copy(const Problem& p) {
  if (!p.features.mask || p.mask.strides.column != 1) return 1;
  for (const int bytes : {16, 8, 4}) {
    const Strides& s = p.mask.strides;
    const auto steps = [&](int64 extent, int64 stride) {
      return extent <= 1 || stride % bytes == 0;
    };
    if (reinterpret_cast<std::uintptr_t>(p.mask.data) % std::uintptr_t(bytes) == 0 &&
        steps(p.sizes.batch, s.batch) && steps(p.sizes.heads_q, s.head) &&
        steps(p.sizes.len_q, s.row)) {
      return bytes;
    }
  }
  return 1;
}

// How a kernel that stages tiles of bias and mask reads them.
inline BiasForm bias_form(const Problem& p, bool pack_gqa) {
  return {.type = p.features.bias ? p.bias.type : Type::none,
          .aligned = is_bias_aligned(p),
          .one_row = is_bias_of_keys(p, pack_gqa)};
}
inline MaskForm mask_form(const Problem& p, bool pack_gqa) {
  return {.one_row = is_mask_of_keys(p, pack_gqa), .copy_bytes = bytes_of_mask_copy(p)};
}

// The features that are compiled in. The backward pass needs no sink, because lse includes it.
inline Features kernel_features(const Problem& p) {
  Features features = p.features;
  if (p.backward) features.sink = false;
  return features;
}

// Whether kernels that draw dropout's bits read its seed.
inline bool reads_seed(const Problem& p) { return p.features.dropout && p.seed_in_memory; }

// Whether a forward tile has rows of one block of positions only, where positions of rows that do
// not exist are read as well.
inline bool fits_positions(const KernelConfig& c) {
  const Features& f = c.features;
  return !f.positions || !(f.alibi || f.dropout) || kPositionBlock % c.tiling.rows == 0;
}

inline bool wants_dbias(const Problem& p) { return p.features.bias && p.wants(p.dbias); }

// Whether several tiles add to an element of dbias: in f32 sums, or in dbias itself.
inline bool adds_dbias(const KernelConfig& main) {
  return main.dbias.how != BiasGradient::none && main.dbias.how != BiasGradient::store;
}
inline bool adds_to_dbias_itself(const Problem& p, const KernelConfig& main) {
  return adds_dbias(main) && p.accumulate && p.dbias.given() && p.dbias.type == Type::f32;
}

inline Wanted wanted_of(const Problem& p) {
  return {.dq = p.wants(p.dq), .dk = p.wants(p.dk), .dv = p.wants(p.dv)};
}

// Whether one instruction can add to two neighbouring f32 elements: pairs begin at 8 bytes.
inline bool has_aligned_pairs(const View& view) {
  const Strides& s = view.strides;
  return s.column == 1 && (s.row | s.head | s.batch) % 2 == 0 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 8 == 0;
}

// Whether 16 bytes of neighbouring elements of a row can be written at once.
inline bool has_aligned_vectors(const View& view) {
  const Strides& s = view.strides;
  const int64 count = 16 / int64(size_of(view.type));
  return s.column == 1 && (s.row | s.head | s.batch) % count == 0 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
}

// The mean length of packed sequences, which have `all` rows or keys together; else `longest`.
inline int64 mean_length(const Problem& p, int64 all, int64 longest) {
  return p.packed && p.sizes.batch > 0 ? smaller(longest, divide_up(all, p.sizes.batch)) : longest;
}

// The rows of a sequence; if sequences are packed and all short, their mean. A mean of longer ones
// may say little, because places of a batch can be empty.
inline int64 usual_rows(const Problem& p) {
  constexpr int64 kShort = 256;
  const Sizes& s = p.sizes;
  return s.len_q > kShort ? s.len_q : mean_length(p, s.rows_q, s.len_q);
}

// The size of a group of heads: at most `most`, and such that groups are nearly equal, because a
// small last group would leave multiprocessors idle.
inline int64 even_group(int64 heads, int64 most) {
  heads = larger<int64>(heads, 1);
  most = clamp_to<int64>(most, 1, heads);
  int64 best = most, missing = heads;  // from the last group
  const int64 fewest = divide_up(heads, most);
  for (int64 groups = fewest; groups <= 2 * fewest && missing > 0; ++groups) {
    const int64 size = divide_up(heads, groups), rest = size * divide_up(heads, size) - heads;
    if (rest * best < missing * size) best = size, missing = rest;
  }
  return best;
}

// From the first to the last key that some query of the longest sequence sees: how many keys.
inline int64 keys_in_reach(const Problem& p) {
  const Sizes& s = p.sizes;
  if (!p.features.interval || s.len_q == 0 || p.varlen || p.features.positions) return s.len_k;
  const int64 begin = visible_keys(p.mask_params, 0, s.len_q, s.len_k).begin;
  return larger<int64>(0, visible_keys(p.mask_params, s.len_q - 1, s.len_q, s.len_k).end - begin);
}

// Whether a tile of mma may have all keys of a sequence, so that one backward kernel does all.
// Where pairs are hidden, a block flags its rows, and has room for so many flags; with a mask or
// spans, more rows would have a tile map.
inline bool may_have_whole_keys(const Problem& p) {
  constexpr int64 kKeys = 128, kWideKeys = 64, kRowsWithoutMap = 96;
  const Sizes& s = p.sizes;
  const int64 columns = larger(s.dim, s.dim_v);
  if (s.len_k == 0 || s.len_k > (columns <= 128 ? kKeys : kWideKeys) || columns > 256) return false;
  if ((p.type != Type::f16 && p.type != Type::bf16) || p.features.sink) return false;
  if (!hides_pairs(p)) return true;
  return s.group() * s.len_q <= kMostRowsAgain && !wants_dbias(p) &&
         (!tests_pairs(p.features) || s.len_q <= kRowsWithoutMap);
}

inline bool is_broadcast(const Problem& p) {
  const Sizes& s = p.sizes;
  const int64* sizes = p.bias_sizes;
  return sizes[0] != s.batch || sizes[1] != s.heads_q || sizes[2] != s.len_q || sizes[3] != s.len_k;
}

}  // namespace regard
