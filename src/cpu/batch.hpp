// Where each sequence of the batch begins in the arrays that all heads share.
#pragma once

#include <vector>

#include "plan/cpu/plan.hpp"

namespace regard::cpu_backend {

struct BatchEntry {
  Sequence seq;
  int64 rows_q = 0;  // rows of one head in the entries before this one
  int64 rows_k = 0;
  int64 blocks = 0;       // row blocks of one kv head in the entries before this one
  int64 block_count = 0;  // row blocks of one kv head
  int64 chunk_count = 1;  // chunks of keys
};

class Batch {
 public:
  Batch(const Problem& p, const CpuTiling& tiling) : sizes_(p.sizes) {
    entries_.reserve(std::size_t(sizes_.batch));
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
      chunks_ += entry.chunk_count;
    }
    blocks_ = entry.blocks;
  }

  const BatchEntry& operator[](int64 b) const { return entries_[std::size_t(b)]; }
  int64 size() const { return sizes_.batch; }
  // Of one kv head in all entries: row blocks, and chunks of keys.
  int64 blocks() const { return blocks_; }
  int64 chunks() const { return chunks_; }

  // Index of the first row or block of (b, kv) in arrays of all of them.
  int64 first_q(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return (e.rows_q * sizes_.heads_kv + kv * e.seq.len_q) * sizes_.group();
  }
  int64 first_k(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return e.rows_k * sizes_.heads_kv + kv * e.seq.len_k;
  }
  int64 first_block(int64 b, int64 kv) const {
    const BatchEntry& e = (*this)[b];
    return e.blocks * sizes_.heads_kv + kv * e.block_count;
  }

 private:
  const Sizes sizes_;
  std::vector<BatchEntry> entries_;
  int64 blocks_ = 0, chunks_ = 0;
};

}  // namespace regard::cpu_backend
