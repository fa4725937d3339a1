// Which keys the rows of a whole sequence see. With documents, a causal mask and a window together,
// these are one interval for each row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "regard/distributed.hpp"
#include "semantics/positions.h"

namespace regard::distributed {

// Rows that are dealt together: those that one position stands for.
inline constexpr std::int64_t kBlock = kPositionBlock;

class Visibility {
 public:
  explicit Visibility(const WholeSequence& whole);  // must live as long

  // The document of a row; empty for rows after the last one.
  Rows document_of(std::int64_t row) const;
  // The keys that the row sees; begin = end where it sees none.
  Rows seen_by(std::int64_t row) const;
  // Calls body(Rows) for the part of these rows that each document has.
  template <class Body>
  void for_each_document(const Rows& rows, const Body& body) const {
    for (std::int64_t row = rows.begin; row < rows.end;) {
      const Rows document = document_of(row);
      if (document.begin == document.end) return;
      const std::int64_t end = std::min(rows.end, document.end);
      body(Rows{row, end});
      row = end;
    }
  }
  // How many keys these rows of one document see, all counts added.
  std::int64_t pairs_of(const Rows& rows) const;

  bool shows_all() const { return !has_documents() && left_ < 0 && right_ < 0; }
  bool is_plain_causal() const { return !has_documents() && left_ < 0 && right_ == 0; }
  bool has_documents() const { return !whole_.cu_seqlens.empty(); }
  // The causal mask and the window as one window.
  Window band() const { return {.left = left_, .right = right_}; }

 private:
  const WholeSequence& whole_;
  std::int64_t left_, right_;  // -1 = unbounded
};

// Begin and end of each row's document among `keys`, as Attention::row_spans; nothing where there
// are no documents.
std::vector<std::int32_t> document_spans(const WholeSequence&, const std::vector<Rows>& rows,
                                         const Rows& keys);

}  // namespace regard::distributed
