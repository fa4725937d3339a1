// What a launched kernel is given: the problem, and where its scratch memory is.
#pragma once

#include "plan/cuda/kernel/block_grid.h"
#include "plan/cuda/kernel/copy_layout.h"
#include "problem/problem.h"

namespace regard {

// What the backward pass needs of a query row. A row that takes part in nothing (it saw no key, or
// does not exist) has lse = +inf, so that its weights are 0.
template <class Real>
struct RowState {
  Real lse;
  Real delta;  // dout . out - dlse
};

// The gradients of a key. Each has its own flag, because one alone may have to be computed again.
enum class KeyGradient : int32 { dk, dv };

// Null where the launch list does not use them. Real is f32, or f64 for f64 problems.
struct CudaBuffers {
  void* row_states = nullptr;      // [heads_q][rows_q] RowState<Real>, by flat row
  float* dq_sums = nullptr;        // [heads_q][dq_rows][dim of the config], in fragment order
  int32* dq_semaphores = nullptr;  // [batch * heads_q][dq_semaphores of the backward kernel]: key
                                   // tiles that have added
  float* dbias_sums = nullptr;     // where BiasGradient::add adds; dbias itself where it is f32
  Strides dbias_strides;           // of dbias_sums; 0 where the bias is broadcast
  float* partial_out =
      nullptr;  // [splits][heads_q][rows_q][dim_v of the problem], not normalised;
                // decoding: [blocks of the grid][rows of a tile][partial_row_bytes], with
                // stream_k two for each block;
                // split_q: [heads_kv][splits][rows_k][partial_dkv_columns], dk and dv
  float* partial_rows = nullptr;   // [splits][heads_q][rows_q] x {reference, sum}
  uint8* flags_q = nullptr;        // [heads_q][rows_q]: 1 = compute this row again
  uint8* flags_k = nullptr;        // [heads_kv][rows_k][2]: of dk and of dv, by KeyGradient
  uint64* any_flag = nullptr;      // of flags_q, of flags_k: KernelParams::nonce if a flag is set
  uint64* tile_counter = nullptr;  // wgmma: the tile scheduler's counter
  void* row_terms =
      nullptr;  // wgmma: lse of [heads_q][dq_rows], 16 bytes each; delta (f32: hi_lo_layout.h)
  uint64* arrivals = nullptr;  // decoding: of each such part in partial_out, KernelParams::nonce
                               // once it is written
  uint64* tile_map = nullptr;  // see tile_map_layout.h
  uint8* hi_lo = nullptr;      // wgmma of f32: see hi_lo_layout.h
  void* copies[kInputs] = {};  // of inputs, by Input; null where there is none
};

struct KernelParams {
  Problem problem;
  CudaBuffers buffers;
  BlockGrid grid;
  GridDivisors by;
  int32 splits = 1;  // of the forward pass's keys (stream_k: all blocks), of the backward pass's
                     // query rows
  uint64 nonce = 0;  // the call's own number, which old memory does not contain
};

REGARD_INLINE BlockCoords block_coords(const KernelParams& params, int64 number) {
  return block_coords(params.grid, params.by, number);
}

// Flags a row's result or a key's gradient that is not finite, for the fix-up pass. The kernels
// that write every row's flag need no clearing; the others find cleared flags.
REGARD_INLINE void write_row_flag(const KernelParams& params, int64 row, bool nonfinite) {
  params.buffers.flags_q[row] = uint8(nonfinite);
  if (nonfinite) params.buffers.any_flag[0] = params.nonce;
}
REGARD_INLINE uint8& key_flag(const CudaBuffers& buffers, int64 key, KeyGradient gradient) {
  return buffers.flags_k[key * 2 + int(gradient)];
}
REGARD_INLINE void flag_key(const KernelParams& params, int64 key, KeyGradient gradient) {
  key_flag(params.buffers, key, gradient) = 1;
  params.buffers.any_flag[1] = params.nonce;
}
// Whether a row, or a key, of this call is flagged. A replayed graph brings the same nonce: flags
// of its last run then cost a look, no more.
REGARD_INLINE bool has_flags(const KernelParams& params, bool of_keys) {
  return params.buffers.any_flag[of_keys] == params.nonce;
}

// split_q: a gradient's partial sums, as f32 gradients of heads_kv * splits heads.
REGARD_INLINE View partial_dkv(const KernelParams& params, KeyGradient gradient) {
  const Problem& p = params.problem;
  const int64 columns = partial_dkv_columns(p.sizes);
  return {.data = params.buffers.partial_out +
                  (gradient == KeyGradient::dk ? 0 : partial_dk_columns(p.sizes)),
          .type = Type::f32,
          .strides = {.batch = p.packed ? 0 : p.sizes.len_k * columns,
                      .head = p.sizes.rows_k * columns,
                      .row = columns,
                      .column = 1}};
}

// Query heads of a key head. A division of 64 bits would be a call.
REGARD_INLINE int group_of(const Sizes& sizes) {
  return int(uint32(sizes.heads_q) / uint32(sizes.heads_kv));
}
REGARD_INLINE int group_of(const KernelParams& params) { return int(params.by.query_heads.value); }
// A head that is counted through the batch, of which each entry has so many.
struct BatchHead {
  int64 b, h;
};
REGARD_INLINE BatchHead batch_head(int32 head, int64 heads) {
  const uint32 b = uint32(head) / uint32(heads);
  return {b, uint32(head) - b * uint32(heads)};
}

// The index of row (b, i) in buffers with one element for each real row of a head.
REGARD_INLINE int64 flat_row(const Problem& p, const Sequence& seq, int64 b, int64 i) {
  return (p.packed ? seq.first_q : b * p.sizes.len_q) + i;
}
REGARD_INLINE int64 flat_key(const Problem& p, const Sequence& seq, int64 b, int64 j) {
  return (p.packed ? seq.first_k : b * p.sizes.len_k) + j;
}

// The first of a sequence's rows of dq sums.
REGARD_INLINE int64 first_dq_row(const Problem& p, const Sequence& seq, int64 b) {
  return p.packed ? (seq.first_q + 16 * b) / 16 * 16 : b * round_up(p.sizes.len_q, 16);
}

// A sequence from a table in device memory, cut to what the sizes allow.
REGARD_INLINE Sequence safe_sequence(const Problem& p, int64 b) {
  Sequence s = sequence(p.sequences, b);
  const int64 room_q = p.packed ? p.sizes.rows_q : p.sizes.len_q;
  const int64 room_k = p.packed ? p.sizes.rows_k : p.sizes.len_k;
  s.first_q = clamp_to<int64>(s.first_q, 0, room_q);
  s.first_k = clamp_to<int64>(s.first_k, 0, room_k);
  s.len_q = clamp_to<int64>(s.len_q, 0, smaller(p.sizes.len_q, room_q - s.first_q));
  s.len_k = clamp_to<int64>(s.len_k, 0, smaller(p.sizes.len_k, room_k - s.first_k));
  return s;
}

}  // namespace regard
