// cu_seqlens and seqused: checked, and copied where the host can read them.
#pragma once

#include <array>
#include <vector>

#include "problem/problem.h"
#include "regard/regard.hpp"

namespace regard {

// `null_data`: explain and workspace look at shapes only, so data pointers may be null.
enum class NullData : bool { refused, allowed };

// A call's own tables: what was checked is what is used, whatever becomes of the caller's memory.
class TableCopies {
 public:
  const int32* copy(const int32* table, std::int64_t size);

 private:
  std::array<std::vector<int32>, 4> tables_;
  std::size_t count_ = 0;
};

// Without `copies` the tables lie where the host cannot read them: they are neither copied nor
// checked. Where data may be null, they are then left out altogether, as if every sequence were the
// longest.
SequenceTable read_sequences(const Attention&, const Sizes&, bool packed, NullData, TableCopies*);

}  // namespace regard
