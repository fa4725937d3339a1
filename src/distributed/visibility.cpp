#include "distributed/visibility.hpp"

#include <algorithm>

#include "distributed/views.hpp"

namespace regard::distributed {
namespace {

// The sum of min(n, most) for n from begin to end - 1; most = -1 is no bound.
std::int64_t sum_of_least(std::int64_t begin, std::int64_t end, std::int64_t most) {
  const std::int64_t cut = most < 0 ? end : std::clamp(most, begin, end);
  return (begin + cut - 1) * (cut - begin) / 2 + most * (end - cut);
}

}  // namespace

Visibility::Visibility(const WholeSequence& whole)
    : whole_(whole),
      left_(whole.window.left),
      right_(whole.causal == Causal::none ? whole.window.right : 0) {
  // Sides that hide nothing of this sequence are none.
  for (std::int64_t* side : {&left_, &right_}) {
    if (*side >= whole.length - 1) *side = -1;
  }
}

Rows Visibility::document_of(std::int64_t row) const {
  const auto& cuts = whole_.cu_seqlens;
  if (cuts.empty()) return {0, whole_.length};
  const auto end = std::upper_bound(cuts.begin(), cuts.end(), row);
  if (end == cuts.end()) return {row, row};
  return {*(end - 1), *end};
}

Rows Visibility::seen_by(std::int64_t row) const {
  Rows seen = document_of(row);
  // Distances are not added to the row: they may be any number.
  if (left_ >= 0 && left_ < row - seen.begin) seen.begin = row - left_;
  if (right_ >= 0 && right_ < seen.end - 1 - row) seen.end = row + right_ + 1;
  return seen;
}

std::int64_t Visibility::pairs_of(const Rows& rows) const {
  const Rows document = document_of(rows.begin);
  // Each row's own key, those before it and those after it.
  return size_of_range(rows) +
         sum_of_least(rows.begin - document.begin, rows.end - document.begin, left_) +
         sum_of_least(document.end - rows.end, document.end - rows.begin, right_);
}

std::vector<std::int32_t> document_spans(const WholeSequence& whole, const std::vector<Rows>& rows,
                                         const Rows& keys) {
  const Visibility visibility(whole);
  std::vector<std::int32_t> spans;
  if (!visibility.has_documents()) return spans;
  const std::int64_t count = size_of_range(keys);
  for (const Rows& run : rows) {
    for (std::int64_t row = run.begin; row < run.end; ++row) {
      const Rows document = visibility.document_of(row);
      for (const std::int64_t bound : {document.begin, document.end}) {
        spans.push_back(std::int32_t(std::clamp<std::int64_t>(bound - keys.begin, 0, count)));
      }
    }
  }
  return spans;
}

}  // namespace regard::distributed
