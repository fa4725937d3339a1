#include "distributed/ring_pieces.hpp"

#include "distributed/views.hpp"
#include "distributed/visibility.hpp"

namespace regard::distributed {
namespace {

// What goes by positions, or has a column for each key of the sequence.
bool needs_runs(const Attention& a) {
  return a.alibi_slopes.given() || a.dropout.p > 0 || is_over_keys(a.bias) || is_over_keys(a.mask);
}

// How many keys of one owner are before a key of the sequence.
class Places {
 public:
  Places(const PlanContents& plan, int owner)
      : before_(std::size_t(plan.whole.length / kBlock) + 1), is_own_(before_.size()) {
    for (const std::int64_t block : plan.blocks[std::size_t(owner)]) {
      is_own_[std::size_t(block)] = true;
    }
    for (std::size_t n = 1; n < before_.size(); ++n) {
      before_[n] = before_[n - 1] + (is_own_[n - 1] ? kBlock : 0);
    }
  }

  std::int64_t of(std::int64_t key) const {
    const auto block = std::size_t(key / kBlock);
    return before_[block] + (is_own_[block] ? key % kBlock : 0);
  }

 private:
  std::vector<std::int64_t> before_;  // blocks
  std::vector<bool> is_own_;
};

}  // namespace

RingPieces::RingPieces(const Part& part) : part_(part) {
  for (int owner = 0; owner < part.plan().ranks; ++owner) pieces_.push_back(found(owner));
}

std::vector<RingPiece> RingPieces::found(int owner) {
  const PlanContents& plan = part_.plan();
  const std::vector<Rows> runs = plan.runs(owner, part_.rank());
  if (runs.empty() || part_.rows() == 0) return {};
  if (runs.size() > 1 && !needs_runs(part_.attention())) {
    const auto at = std::int64_t(spans_.size());
    add_spans(owner);
    return {{.places = {0, plan.rows(owner)}, .spans_at = at}};
  }
  const Places places(plan, owner);
  std::vector<RingPiece> pieces;
  for (const Rows& run : runs) {
    const std::int64_t first = places.of(run.begin);
    pieces.push_back(
        {.places = {first, first + size_of_range(run)}, .is_run = true, .first_key = run.begin});
  }
  return pieces;
}

void RingPieces::add_spans(int owner) {
  const Visibility visibility(part_.whole());
  const Places places(part_.plan(), owner);
  for (const Rows& run : own_runs()) {
    for (std::int64_t row = run.begin; row < run.end; ++row) {
      const Rows seen = visibility.seen_by(row);
      spans_.push_back(std::int32_t(places.of(seen.begin)));
      spans_.push_back(std::int32_t(places.of(seen.end)));
    }
  }
}

std::vector<std::int32_t> RingPieces::spans_of_run(const RingPiece& piece) const {
  const std::int64_t count = size_of_range(piece.places);
  return document_spans(part_.whole(), own_runs(), {piece.first_key, piece.first_key + count});
}

Attention RingPieces::attention(const RingPiece& piece, const RingTables& tables) const {
  const Visibility visibility(part_.whole());
  Attention a = part_.attention();
  const void* const spans = piece.is_run ? tables.spans_of_run : tables.spans + piece.spans_at;
  if (!piece.is_run || visibility.has_documents()) {
    a.row_spans = Tensor(spans, Type::i32, {1, 1, part_.rows(), 2});
  }
  if (!piece.is_run) return a;
  const Rows keys{piece.first_key, piece.first_key + size_of_range(piece.places)};
  const auto& first = part_.plan().first_positions[std::size_t(part_.rank())];
  a.bias = columns(a.bias, keys);
  a.mask = columns(a.mask, keys);
  a.q_positions = Tensor(tables.positions, Type::i32, {std::int64_t(first.size())});
  a.k_position = keys.begin;
  a.window = visibility.band();
  return a;
}

}  // namespace regard::distributed
