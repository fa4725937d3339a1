// KernelConfig: everything that is fixed when a GPU kernel is compiled. One value: the kernel's
// template argument, the text given to the run-time compiler, the cache's key, a line of explain.
#pragma once

#include "regard/type.hpp"
#include "semantics/features.h"
#include "semantics/portable.h"

namespace regard {

enum class Kernel : uint8 {
  forward,         // out, lse of a tile of query rows
  combine,         // out, lse from the partial results of a forward split over keys
  delta,           // RowState of every query row; clears the scratch memory that is added to
  backward,        // mma: dk, dv of a tile of keys, dq and dbias added across tiles
  key_gradient,    // simt: dk, dv of a tile of keys
  query_gradient,  // simt: dq of a tile of query rows
  bias_gradient,   // simt: dbias of a tile of the bias, over everything it is broadcast to
  finish,          // dq and dbias from their sums; rows and keys that are not finite again
  sink_gradient,   // dsink
  split_f32,       // wgmma of f32: q, k, v, dout as hi and lo parts in f16
  copy_inputs,     // wgmma: copies of q, k, v, dout that TMA can load
  combine_dkv,     // dk, dv from the partial sums of a backward split over query rows
  row_map,         // the tile map of a mask, by tiles of query rows (forward)
  key_map,         // the same by tiles of keys (backward)
  write_rows,      // rows of one tensor to another, a sum, or added to it (src/cuda/write_rows)
};
inline constexpr int kKernelCount = 15;

// Named after the instruction that multiplies.
enum class Family : uint8 { simt, mma, wgmma };

// How the products of f32 inputs are made on tensor cores.
enum class Products : uint8 {
  direct,  // as the type is
  tf32x3,  // three TF32 products of two-term sums: f32's accuracy
  tf32,    // one: asked for by name
  f16x3,   // wgmma: three f16 products of two-term sums: f32's accuracy
};

// Whether infinities become NaN on the way, and rows that meet one are computed again.
REGARD_INLINE bool has_two_terms(Products products) {
  return products == Products::tf32x3 || products == Products::f16x3;
}

// What a call wants of dbias, and how it gets there.
enum class BiasGradient : uint8 {
  none,
  store,         // the bias is not broadcast: every element is written once
  add,           // added to f32 sums in memory
  add_to_row,    // the same, of a bias of one row (all queries share it)
  add_to_column  // of one column (all keys share it)
};

// May change a result by rounding only.
struct Tiling {
  int rows = 64;       // query rows of a tile
  int keys = 64;       // keys of a tile; with key_warps, of the tile of one warp
  int warps = 4;       // of a block; wgmma: four of them only load
  int stages = 2;      // tiles in shared memory at once, of those that the kernel loops over
  int slices = 1;      // mma backward: warps that share a tile's keys, each with a slice of the
                       // columns of dk and dv; combine: warps that share rows, each with some
                       // splits; wgmma forward: blocks that share a tile of rows, each with a slice
                       // of out's columns
  int key_warps = 1;   // mma forward: warps that share a tile's rows and split its keys
  int min_blocks = 1;  // blocks that should fit a multiprocessor: the bound on registers

  bool operator==(const Tiling&) const = default;
};

struct BiasForm {
  Type type = Type::none;  // none without a bias
  bool aligned = false;    // f16, bf16 or f32 that can be read 16 bytes at a time
  bool one_row = false;    // staged: f16, bf16 or f32 of one row for all rows of a tile
  bool by_tma = false;     // wgmma forward: TMA loads its tiles

  bool operator==(const BiasForm&) const = default;
};

struct MaskForm {
  bool one_row = false;  // staged: one row for all rows of a tile
  int copy_bytes = 1;    // staged: bytes that are copied at once: 16, 8, 4 or 1
  bool as_bits = false;  // with a tile map: bits of pairs behind it are read instead of the mask

  bool operator==(const MaskForm&) const = default;
};

// What the wgmma backward kernel reads of a query row.
struct RowTerms {
  bool used = false;              // delta, split_f32: write them; finish: reads a factor of dq
  bool joined = false;            // lse and delta share one 16-byte vector
  bool lse_in_product = false;    // the product that makes scores also adds lse
  bool delta_in_product = false;  // the product that makes dP also adds delta

  bool operator==(const RowTerms&) const = default;
};

struct Wanted {
  bool dq = false;
  bool dk = false;
  bool dv = false;

  bool operator==(const Wanted&) const = default;
};

struct DbiasForm {
  BiasGradient how = BiasGradient::none;
  bool pairs = false;    // mma: its sums can be added to by pairs of keys
  bool aligned = false;  // wgmma: 16 bytes of dbias, or of its sums, are one access
  bool is_f32 = false;   // wgmma, store: dbias is f32 where the bias is not

  bool operator==(const DbiasForm&) const = default;
};

struct KernelConfig {
  Kernel kernel = Kernel::forward;
  Family family = Family::simt;
  int level = 80;          // the oldest chip it must run on: 75, 80 or 90; simt: 50
  Type type = Type::none;  // of q, k and v
  Products products = Products::direct;
  Features features{};
  int dim = 0;  // mma: head sizes of the tiles, rounded up to 16 (f32: 8); else as they are
  int dim_v = 0;
  int sums_dim = 0;  // finish: dim of the kernel that made the sums of dq; 0 without them
  Tiling tiling{};
  bool aligned = true;       // q, k, v, dout can be read 16 bytes at a time
  bool exact_dims = false;   // mma: head sizes are those of the tiles
  bool dout_is_f32 = false;  // backward: dout is f32 where the type is not
  bool out_by_tma = false;   // wgmma: TMA stores out, or dk and dv
  BiasForm bias{};
  MaskForm mask{};
  bool varlen = false;          // sequence lengths are read from memory
  bool seed_in_memory = false;  // dropout's seed is read from memory
  bool pack_gqa = false;        // forward: a tile's rows run over the query heads of a key head
  bool split_kv = false;        // forward: the keys are split over blocks
  bool split_q = false;         // backward: the query rows of a tile of keys are split over blocks
  bool merges_splits = false;   // forward: the last block of a tile's splits merges them
  bool stream_k = false;        // forward with key warps: blocks have equal shares of the tiles of
                                // keys of all heads; split_kv is false then
  bool continues = false;       // forward, combine: merges rows with what out and lse hold
  bool whole_keys = false;    // mma backward: a tile has all keys of a sequence, so that the kernel
                              // makes delta and dq itself
  bool given_delta = false;   // delta, whole_keys: it is read, not made of dout and out
  bool skips_blocks = false;  // wgmma forward: warpgroups skip key blocks that are masked for
                              // all of their rows
  bool tile_map = false;      // main kernels: a tile map says what mask and spans hide
  bool tile_order = false;    // with a tile map: own tiles begin in the order of their lengths
  RowTerms row_terms{};
  bool cta_pair = false;         // wide wgmma backward: two blocks of a cluster share the columns
                                 // of dq
  bool flags_nonfinite = false;  // flags rows whose result is not finite, to be computed again
  bool repeats_rows = false;     // forward, whole_keys: computes such rows, and keys, again itself,
                                 // at its end
  bool only_flagged = false;     // simt: computes only what is flagged
  bool rows_outer = false;       // wgmma backward: a block takes a tile of rows of all query heads
                                 // of its key head before the next tile of rows
  bool persistent = false;       // wgmma backward: a block takes one tile after another
  bool ordered_dq = false;       // blocks add to dq in a fixed order: deterministic
  Wanted wanted{};
  DbiasForm dbias{};
  int cluster = 1;  // blocks of a cluster. wgmma backward: batch entries that share a bias; forward
                    // with key warps: the splits of a tile, which merge their parts

  bool operator==(const KernelConfig&) const = default;
};

// The features that every tile needs. With a tile map, mask and spans are looked at in tiles that
// are neither hidden nor full.
REGARD_INLINE Features full_tile_features(const KernelConfig& c) {
  Features on = c.features;
  if (c.tile_map) on.mask = on.row_spans = on.key_spans = false;
  return on;
}

REGARD_INLINE int cluster_size(const KernelConfig& c) { return c.cta_pair ? 2 : c.cluster; }

}  // namespace regard
