// Ring: which of an owner's keys one call of a rank has, and what of them its rows see.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/part.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

// Keys of one owner that are attended to together.
struct RingPiece {
  int owner = 0;
  Rows places{};  // of the owner's rows
  // The keys follow each other in the sequence: masks go by positions. Else by a span for each row.
  bool is_run = false;
  std::int64_t first_key = 0;  // in the sequence, of a run
};

class RingPieces {
 public:
  explicit RingPieces(const Part& part) : part_(part) {}

  // None where no row sees a key of the owner. Of its own keys a rank with rows has one at least.
  std::vector<RingPiece> of(int owner) const;
  // For each own row begin and end among the piece's keys, as Attention::row_spans; nothing where
  // positions say all.
  std::vector<std::int32_t> spans(const RingPiece&) const;
  // The call's masks, bias and positions, without keys. The tables are where kernels read them.
  Attention attention(const RingPiece&, const void* positions, const void* spans) const;

 private:
  bool needs_runs() const;
  std::int64_t place_of(int owner, std::int64_t key) const;

  const Part& part_;
};

}  // namespace regard::distributed
