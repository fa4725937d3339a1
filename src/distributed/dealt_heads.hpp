// Ulysses: a tensor between its two forms. By rows, each rank has its rows of all heads; by heads,
// it has all rows of its own heads.
//
// Ranks' rows are contiguous, and heads are held as (S, B, heads, width): what comes from a rank is
// received where it belongs, and what goes to a rank as rows is sent from where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distributed/heads.hpp"
#include "distributed/memory.hpp"
#include "distributed/part.hpp"
#include "distributed/ranks.hpp"
#include "plan/count.h"

namespace regard::distributed {

class DealtHeads {
 public:
  using Layout = MemoryLayout<kAlignment>;

  // A tensor (B or 1, heads of all ranks, rows of this rank, width), which moves as `type`.
  // heads: of each rank.
  DealtHeads(const char* name, const Part&, const Tensor& by_rows, Type type,
             std::vector<Heads> heads);

  // Places in the workspace, each taken before it is used: the heads; messages that are packed, or
  // that come; and sums, where several ranks have parts of a head, or of all rows.
  void take_heads(Layout& layout) { heads_at_ = layout.take(bytes_of(length_, rank_)); }
  void take_packed(Layout& layout) { packed_at_ = layout.take(bytes_of_others()); }
  void take_parts(Layout& layout);

  // The tensor by heads: (B or 1, own heads, S, width).
  Tensor by_heads(std::byte* workspace) const;
  void clear(std::byte* workspace, Memory&) const;

  // Rows to heads: packs own rows, and says what moves.
  void send_rows(std::byte* workspace, Memory&, Messages&) const;
  // Heads to rows: says what moves; then writes what has come to a tensor as by_rows, or adds it.
  // What several ranks have of one head is added in the order of ranks.
  void send_heads(std::byte* workspace, Messages&) const;
  void write_rows(std::byte* workspace, Memory&, const Tensor& to, bool accumulate) const;

  // What has to be equal on all ranks.
  std::string facts() const;

 private:
  std::int64_t count_of(int rank) const { return size_of_range(heads_[std::size_t(rank)]); }
  Count bytes_of(std::int64_t rows, int rank) const;
  Count bytes_of_others() const;
  std::byte* heads_from(std::byte* workspace, std::int64_t first_row) const;
  Tensor totals(std::byte* workspace) const;
  void sum_parts(std::byte* workspace, Memory&) const;
  void sum_rows(const Tensor& totals, Memory&) const;
  // (rank, own rows of its heads): those of others from `first` on, one after the other.
  template <class Work>
  void each_part(std::byte* workspace, std::int64_t first, const Work& work) const;

  const char* name_;
  Tensor by_rows_;
  Type type_;
  std::vector<Heads> heads_;
  int ranks_, rank_;
  std::int64_t length_, rows_;
  std::int64_t batch_, count_, width_;  // count: of all heads
  std::vector<Rows> rows_of_ranks_;
  bool shares_rows_;  // one row stands for all, or for none
  bool sums_ = false;
  std::int64_t heads_at_ = 0, packed_at_ = 0, parts_at_ = 0, totals_at_ = 0;
};

}  // namespace regard::distributed
