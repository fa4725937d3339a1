// Ring: which of an owner's keys one call of a rank has, and what of them its rows see.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/part.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

// Keys of one owner that are attended to together.
struct RingPiece {
  Rows places{};  // of the owner's rows
  // The keys follow each other in the sequence: masks go by positions, documents by spans that are
  // made for the call. Else all masks go by spans that are made once.
  bool is_run = false;
  std::int64_t first_key = 0;  // of a run, in the sequence
  std::int64_t spans_at = 0;   // else: in RingPieces::spans
};

// Where kernels read them.
struct RingTables {
  const void* positions = nullptr;      // of the first row of each own block
  const std::int32_t* spans = nullptr;  // RingPieces::spans
  const void* spans_of_run = nullptr;   // of this piece
};

class RingPieces {
 public:
  explicit RingPieces(const Part& part);

  // None where no row sees a key of the owner. Of its own keys a rank with rows has one at least.
  const std::vector<RingPiece>& of(int owner) const { return pieces_[std::size_t(owner)]; }
  // Begin and end of what each own row sees, among the keys of each piece that is no run.
  const std::vector<std::int32_t>& spans() const { return spans_; }
  // The same of a run; nothing where there are no documents.
  std::vector<std::int32_t> spans_of_run(const RingPiece&) const;
  // The call's masks, bias and positions, without keys.
  Attention attention(const RingPiece&, const RingTables&) const;

 private:
  std::vector<RingPiece> found(int owner);
  void add_spans(int owner);
  std::vector<Rows> own_runs() const { return part_.plan().runs(part_.rank(), part_.rank()); }

  const Part& part_;
  std::vector<std::vector<RingPiece>> pieces_;
  std::vector<std::int32_t> spans_;
};

}  // namespace regard::distributed
