// cu_seqlens, seqused and q_positions: checked, and copied where the host can read them.
#pragma once

#include <array>
#include <vector>

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

// Which data pointers may be null: none in a call; all where explain and workspace need shapes
// only; for a Mask, those of tensors that it is not made of.
enum class NullData : unsigned char { refused, outside_masks, allowed };

// Copies of a call's tables: what was checked is what is used, even if the caller's memory changes.
class TableCopies {
 public:
  const int32* copy(const int32* table, std::int64_t size);

 private:
  std::array<std::vector<int32>, 5> tables_;
  std::size_t count_ = 0;
};

// Without `copies` the tables lie where the host cannot read them, and are neither copied nor
// checked. If data may be null too, they are left out, as if every sequence were the longest.
SequenceTable read_sequences(const Attention&, const Sizes&, bool packed, NullData, TableCopies*);

}  // namespace regard
