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
  delta,           // RowState of every query row; clears dq sums
  backward,        // mma: dk, dv of a tile of keys, dq and dbias added across tiles
  key_gradient,    // simt: dk, dv of a tile of keys
  query_gradient,  // simt: dq of a tile of query rows
  bias_gradient,   // simt: dbias of a tile of the bias, over everything it is broadcast to
  convert_dq,      // dq from its sums
  convert_dbias,   // dbias from its sums
  sink_gradient,   // dsink
  planes,          // wgmma of f32: q, k, v, dout as pairs of f16 planes
  copy_inputs,     // wgmma: copies of q, k, v, dout that the copy engine can load
};
inline constexpr int kKernelCount = 12;

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
  int rows = 64;    // query rows of a tile
  int keys = 64;    // keys of a tile; with walkers, of one's
  int warps = 4;    // of a block; wgmma: four of them only load
  int stages = 2;   // tiles of what is walked over that are in shared memory at once
  int slices = 1;   // mma backward: warps that share a tile's keys, each with a slice of dk and dv;
                    // combine: that share rows, each with some of the splits
  int walkers = 1;  // mma forward: warps that have the same rows, each with key tiles of its own
  int blocks = 1;   // blocks that should fit a multiprocessor: the bound on registers

  bool operator==(const Tiling&) const = default;
};

struct KernelConfig {
  Kernel kernel = Kernel::forward;
  Family family = Family::simt;
  int level = 80;               // the oldest chip it must run on: 75, 80 or 90; simt: 50
  Type type = Type::none;       // of q, k and v
  Type bias_type = Type::none;  // none without a bias
  Products products = Products::direct;
  Features features{};
  int dim = 0;  // mma: head sizes of the tiles, rounded up to 16 (f32: 8); else as they are
  int dim_v = 0;
  Tiling tiling{};
  bool aligned = true;        // q, k, v, dout can be read 16 bytes at a time
  bool exact = false;         // mma: head sizes are those of the tiles
  bool wide_dout = false;     // backward: dout is f32 where the type is not
  bool boxed_out = false;     // wgmma: out, or dk and dv, leave through the copy engine
  bool bias_aligned = false;  // f16, bf16 or f32 bias that can be read 16 bytes at a time
  bool boxed_bias = false;    // wgmma forward: the bias comes through the copy engine's boxes
  bool bias_of_keys = false;  // staged: f16, bf16 or f32 bias of one row for all rows of a tile
  bool mask_of_keys = false;  // staged: the same of the mask
  int mask_copy = 1;          // staged: bytes of the mask that are copied at once: 16, 8, 4 or 1
  bool bias_pairs = false;    // the sums of dbias can be added to by pairs of keys
  bool ragged = false;        // sequence lengths are read from memory
  bool folded = false;        // forward: the rows of a tile run over the query heads of a kv head
  bool split = false;         // forward: the keys are split over blocks
  bool uneven = false;     // wgmma forward: warpgroups leave out keys that none of their rows sees
  bool row_terms = false;  // delta, planes: also writes what the wgmma backward kernel reads of
                           // a row; convert_dq: reads a factor of dq there
  bool paired = false;     // wide wgmma backward: clusters of two blocks share the columns of dq
  bool marks = false;      // notes rows whose result is not finite, to be computed again
  bool marked = false;     // simt: computes only what is marked
  bool ordered = false;  // blocks wait for those before them: dq is added in a fixed order, or the
                         // last of a tile's splits merges them
  bool wants_dq = false;
  bool wants_dk = false;
  bool wants_dv = false;
  BiasGradient bias_gradient = BiasGradient::none;
  bool dbias_aligned = false;  // wgmma: 16 bytes of dbias, or of its sums, are one access
  bool wide_dbias = false;     // wgmma, store: dbias is f32 where the bias is not
  int cluster = 1;  // wgmma backward: blocks of a cluster, batch entries that share a bias

  bool operator==(const KernelConfig&) const = default;
};

// Blocks of a cluster. (The delta kernel of pairs, which writes what they read, has none.)
REGARD_INLINE int cluster_size(const KernelConfig& c) {
  return c.paired && c.kernel == Kernel::backward ? 2 : c.cluster;
}

}  // namespace regard
