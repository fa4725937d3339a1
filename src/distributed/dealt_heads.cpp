#include "distributed/dealt_heads.hpp"

#include <algorithm>
#include <utility>

#include "distributed/views.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

std::vector<Rows> rows_of_ranks(const PlanContents& plan) {
  std::vector<Rows> found;
  std::int64_t first = 0;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    found.push_back({first, first + plan.rows(rank)});
    first = found.back().end;
  }
  return found;
}

bool overlap(const std::vector<Heads>& heads) {
  std::int64_t reached = 0;
  for (const Heads& own : heads) {
    if (own.begin < std::min(reached, own.end)) return true;
    reached = std::max(reached, own.end);
  }
  return false;
}

}  // namespace

DealtHeads::DealtHeads(const char* name, const Part& part, const Tensor& by_rows, Type type,
                       std::vector<Heads> heads)
    : name_(name),
      by_rows_(in_four_dimensions(by_rows)),
      type_(type),
      heads_(std::move(heads)),
      ranks_(part.plan().ranks),
      rank_(part.rank()),
      length_(part.whole().length),
      rows_(part.rows()),
      batch_(by_rows_.sizes[0]),
      count_(by_rows_.sizes[1]),
      width_(by_rows_.sizes[3]),
      rows_of_ranks_(rows_of_ranks(part.plan())),
      shares_rows_(by_rows_.sizes[2] == 1 && rows_ != 1) {
  if (shares_rows_) {  // other ranks may have other values
    by_rows_.sizes[2] = rows_;
    by_rows_.strides[2] = 0;
  }
}

void DealtHeads::take_parts(Layout& layout) {
  sums_ = shares_rows_ || overlap(heads_);
  parts_at_ = layout.take(bytes_of_others());
  if (!sums_) return;
  const Count row = Count(batch_) * count_ * width_ * std::int64_t(size_of(type_));
  totals_at_ = layout.take(row * std::max<std::int64_t>(rows_, 1));
}

Count DealtHeads::bytes_of(std::int64_t rows, int rank) const {
  return Count(rows) * batch_ * count_of(rank) * width_ * std::int64_t(size_of(type_));
}

// Bytes of own rows in the messages to and from other ranks.
Count DealtHeads::bytes_of_others() const {
  Count bytes = 0;
  for (int other = 0; other < ranks_; ++other) {
    if (other != rank_) bytes = bytes + bytes_of(rows_, other);
  }
  return bytes;
}

std::byte* DealtHeads::heads_from(std::byte* workspace, std::int64_t first_row) const {
  return workspace + heads_at_ + bytes_of(first_row, rank_).value();
}

Tensor DealtHeads::by_heads(std::byte* workspace) const {
  return rows_first(heads_from(workspace, 0), type_, batch_, count_of(rank_), length_, width_);
}

void DealtHeads::clear(std::byte* workspace, Memory& memory) const {
  memory.zero(heads_from(workspace, 0), std::size_t(bytes_of(length_, rank_).value()));
}

template <class Work>
void DealtHeads::each_part(std::byte* workspace, std::int64_t first, const Work& work) const {
  std::byte* at = workspace + first;
  for (int rank = 0; rank < ranks_; ++rank) {
    const bool is_own = rank == rank_;
    std::byte* const place =
        is_own ? heads_from(workspace, rows_of_ranks_[std::size_t(rank)].begin) : at;
    work(rank, rows_first(place, type_, batch_, count_of(rank), rows_, width_));
    if (!is_own) at += bytes_of(rows_, rank).value();
  }
}

void DealtHeads::send_rows(std::byte* workspace, Memory& memory, Messages& messages) const {
  each_part(workspace, packed_at_, [&](int rank, const Tensor& part) {
    memory.write(heads_of(by_rows_, heads_[std::size_t(rank)]), part, false);
    const auto bytes = std::size_t(bytes_of(rows_, rank).value());
    if (rank != rank_ && bytes > 0) messages.sends.push_back({rank, part.data, bytes});
  });
  for (int other = 0; other < ranks_; ++other) {
    const Rows& rows = rows_of_ranks_[std::size_t(other)];
    const auto bytes = std::size_t(bytes_of(size_of_range(rows), rank_).value());
    if (other == rank_ || bytes == 0) continue;
    messages.receives.push_back({other, heads_from(workspace, rows.begin), bytes});
  }
}

void DealtHeads::send_heads(std::byte* workspace, Messages& messages) const {
  for (int other = 0; other < ranks_; ++other) {
    const Rows& rows = rows_of_ranks_[std::size_t(other)];
    const auto bytes = std::size_t(bytes_of(size_of_range(rows), rank_).value());
    if (other == rank_ || bytes == 0) continue;
    messages.sends.push_back({other, heads_from(workspace, rows.begin), bytes});
  }
  each_part(workspace, parts_at_, [&](int rank, const Tensor& part) {
    const auto bytes = std::size_t(bytes_of(rows_, rank).value());
    if (rank != rank_ && bytes > 0) messages.receives.push_back({rank, part.data, bytes});
  });
}

void DealtHeads::write_rows(std::byte* workspace, Memory& memory, const Tensor& to,
                            bool accumulate) const {
  const Tensor target = in_four_dimensions(to);
  if (sums_) {
    sum_parts(workspace, memory);
    memory.write(rows_of(totals(workspace), {0, target.sizes[2]}), target, accumulate);
    return;
  }
  each_part(workspace, parts_at_, [&](int rank, const Tensor& part) {
    memory.write(part, heads_of(target, heads_[std::size_t(rank)]), accumulate);
  });
}

// One row at least, which is zero where this rank has none.
Tensor DealtHeads::totals(std::byte* workspace) const {
  return rows_first(workspace + totals_at_, type_, batch_, count_, std::max<std::int64_t>(rows_, 1),
                    width_);
}

void DealtHeads::sum_parts(std::byte* workspace, Memory& memory) const {
  const Tensor all = totals(workspace);
  memory.zero(all.data, std::size_t(all.sizes[2] * all.strides[2]) * size_of(type_));
  each_part(workspace, parts_at_, [&](int rank, const Tensor& part) {
    const Tensor sum = rows_of(all, {0, rows_});
    memory.write(part, heads_of(sum, heads_[std::size_t(rank)]), true);
  });
  if (shares_rows_) sum_rows(all, memory);
}

// Into the first row: the second half is added to the first one, until one row is left.
void DealtHeads::sum_rows(const Tensor& totals, Memory& memory) const {
  for (std::int64_t count = rows_; count > 1;) {
    const std::int64_t half = (count + 1) / 2;
    memory.write(rows_of(totals, {half, count}), rows_of(totals, {0, count - half}), true);
    count = half;
  }
}

std::string DealtHeads::facts() const {
  return std::string(", ") + name_ + " " + regard::name_of(type_) + " [" + printed(batch_) + ", " +
         printed(count_) + ", rows, " + printed(width_) + "]";
}

}  // namespace regard::distributed
