#include "distributed/ring_pieces.hpp"

#include <algorithm>

#include "distributed/views.hpp"
#include "distributed/visibility.hpp"

namespace regard::distributed {

std::vector<RingPiece> RingPieces::of(int owner) const {
  const std::vector<Rows> runs = part_.plan().runs(owner, part_.rank());
  if (runs.empty() || part_.rows() == 0) return {};
  if (runs.size() > 1 && !needs_runs()) {
    return {{.owner = owner, .places = {0, part_.plan().rows(owner)}}};
  }
  std::vector<RingPiece> pieces;
  for (const Rows& run : runs) {
    const std::int64_t first = place_of(owner, run.begin);
    pieces.push_back({.owner = owner,
                      .places = {first, first + run.end - run.begin},
                      .is_run = true,
                      .first_key = run.begin});
  }
  return pieces;
}

// What goes by positions, or has a column for each key of the sequence.
bool RingPieces::needs_runs() const {
  const Attention& a = part_.attention();
  return a.alibi_slopes.given() || a.dropout.p > 0 || is_over_keys(a.bias) || is_over_keys(a.mask);
}

// How many keys of the owner are before this one.
std::int64_t RingPieces::place_of(int owner, std::int64_t key) const {
  const std::vector<std::int64_t>& blocks = part_.plan().blocks[std::size_t(owner)];
  const auto block = std::lower_bound(blocks.begin(), blocks.end(), key / kBlock);
  const bool is_its_own = block != blocks.end() && *block == key / kBlock;
  return (block - blocks.begin()) * kBlock + (is_its_own ? key % kBlock : 0);
}

std::vector<std::int32_t> RingPieces::spans(const RingPiece& piece) const {
  const std::vector<Rows> own = part_.plan().runs(part_.rank(), part_.rank());
  if (piece.is_run) {
    const Rows keys{piece.first_key, piece.first_key + piece.places.end - piece.places.begin};
    return document_spans(part_.whole(), own, keys);
  }
  const Visibility visibility(part_.whole());
  std::vector<std::int32_t> found;
  for (const Rows& run : own) {
    for (std::int64_t row = run.begin; row < run.end; ++row) {
      const Rows seen = visibility.seen_by(row);
      found.push_back(std::int32_t(place_of(piece.owner, seen.begin)));
      found.push_back(std::int32_t(place_of(piece.owner, seen.end)));
    }
  }
  return found;
}

Attention RingPieces::attention(const RingPiece& piece, const void* positions,
                                const void* spans) const {
  const Visibility visibility(part_.whole());
  Attention a = part_.attention();
  if (!piece.is_run || visibility.has_documents()) {
    a.row_spans = Tensor(spans, Type::i32, {1, 1, part_.rows(), 2});
  }
  if (!piece.is_run) return a;
  const Rows keys{piece.first_key, piece.first_key + piece.places.end - piece.places.begin};
  const auto& first = part_.plan().first_positions[std::size_t(part_.rank())];
  a.bias = columns(a.bias, keys);
  a.mask = columns(a.mask, keys);
  a.q_positions = Tensor(positions, Type::i32, {std::int64_t(first.size())});
  a.k_position = keys.begin;
  a.window = visibility.band();
  return a;
}

}  // namespace regard::distributed
