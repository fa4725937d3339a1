// Where each sequence of the batch begins in the arrays that all heads share.
#pragma once

#include <vector>

#include "plan/cpu/plan.hpp"

namespace regard::cpu_backend {

struct BatchEntry {
  Sequence seq;
  int64 block_count = 0;  // row blocks of one kv head
  int64 chunk_count = 1;  // chunks of keys
  // Totals of the entries before this one, for one kv head.
  int64 rows_q = 0;  // rows of one query head
  int64 rows_k = 0;
  int64 blocks = 0;
  int64 chunks = 0;
  int64 dq_blocks = 0;  // row blocks of entries of more than one chunk, which sum dq
};

class Batch {
 public:
  Batch(const Problem& p, const CpuTiling& tiling) : sizes_(p.sizes) {
    entries_.reserve(std::size_t(sizes_.batch) + 1);
    BatchEntry entry;
    for (int64 b = 0; b < sizes_.batch; ++b) {
      entry.seq = sequence(p.sequences, b);
      entry.block_count =
          entry.seq.len_q > 0 ? RowBlocks(tiling, entry.seq.len_q, sizes_.group()).count() : 0;
      entry.chunk_count = chunks_of(tiling, entry.seq.len_k);
      entries_.push_back(entry);
      entry.rows_q += entry.seq.len_q;
      entry.rows_k += entry.seq.len_k;
      entry.blocks += entry.block_count;
      entry.chunks += entry.chunk_count;
      if (entry.chunk_count > 1) entry.dq_blocks += entry.block_count;
    }
    entries_.push_back(entry);
  }

  const BatchEntry& operator[](int64 b) const { return entries_[std::size_t(b)]; }
  int64 size() const { return sizes_.batch; }
  const BatchEntry& totals() const { return entries_.back(); }  // what precedes the batch's end

  // Index of the first row or block of (b, kv) in arrays of all of them.
  int64 first_q(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return (e.rows_q * sizes_.heads_kv + kv * e.seq.len_q) * sizes_.group();
  }
  int64 first_k(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return e.rows_k * sizes_.heads_kv + kv * e.seq.len_k;
  }
  int64 first_dq_block(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return e.dq_blocks * sizes_.heads_kv + (e.chunk_count > 1 ? kv * e.block_count : 0);
  }

 private:
  const Sizes sizes_;
  std::vector<BatchEntry> entries_;
};

}  // namespace regard::cpu_backend
