// The gradient of the sink where each rank has one for its rows: every rank gets the sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "distributed/memory.hpp"
#include "distributed/part.hpp"
#include "distributed/ranks.hpp"
#include "plan/count.h"

namespace regard::distributed {

// to = from, or to += from: (Hq), `from` contiguous.
inline void write_sinks(Memory& by, void* from, const Tensor& to, std::int64_t heads,
                        bool accumulate) {
  const auto row = [&](void* data, std::int64_t stride) {
    return Tensor{data, Type::f32, {1, heads, 1, 1}, {0, stride, 0, 1}};
  };
  by.write(row(from, 1), row(to.data, to.strides[0]), accumulate);
}

// dsink of each rank, and their sum, in memory of (ranks + 1, Hq).
class SinkSums {
 public:
  explicit SinkSums(const Part& part)
      : heads_(part.whole().heads_q), ranks_(part.plan().ranks), rank_(part.rank()) {}

  Count bytes() const { return Count(ranks_ + 1) * heads_ * std::int64_t(sizeof(float)); }
  Tensor own(std::byte* memory) const { return {of(memory, rank_), Type::f32, {heads_}}; }
  void clear(std::byte* memory, Memory& by) const { by.zero(of(memory, rank_), bytes_of_one()); }

  void add_messages(std::byte* memory, Messages& messages) const {
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      messages.sends.push_back({other, of(memory, rank_), bytes_of_one()});
      messages.receives.push_back({other, of(memory, other), bytes_of_one()});
    }
  }

  // Adds the ranks' dsink in the order of ranks.
  void sum(std::byte* memory, Memory& by, const Tensor& dsink, bool accumulate) const {
    const Tensor total(of(memory, ranks_), Type::f32, {heads_});
    for (int rank = 0; rank < ranks_; ++rank) {
      write_sinks(by, of(memory, rank), total, heads_, rank > 0);
    }
    write_sinks(by, total.data, dsink, heads_, accumulate);
  }

 private:
  std::size_t bytes_of_one() const { return std::size_t(heads_) * sizeof(float); }
  std::byte* of(std::byte* memory, int rank) const {
    return memory + std::size_t(rank) * bytes_of_one();
  }

  std::int64_t heads_;
  int ranks_, rank_;
};

}  // namespace regard::distributed
