#include "distributed/dealing.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace regard::distributed {
namespace {

// Where chunks begin and end; the rest's blocks go to chunk `first` and those after it.
std::vector<std::int64_t> cuts_of(std::int64_t count, int chunks, int first) {
  const std::int64_t size = count / chunks, rest = count % chunks;
  std::vector<std::int64_t> cuts = {0};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool is_longer = (chunk - first + chunks) % chunks < rest;
    cuts.push_back(cuts.back() + size + is_longer);
  }
  return cuts;
}

void add_range(std::vector<std::int64_t>& to, std::int64_t begin, std::int64_t end) {
  for (std::int64_t block = begin; block < end; ++block) to.push_back(block);
}

}  // namespace

Blocks deal_contiguous(std::int64_t count, int ranks) {
  Blocks dealt(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    add_range(dealt[std::size_t(rank)], rank * count / ranks, (rank + 1) * count / ranks);
  }
  return dealt;
}

Blocks deal_zigzag(const std::vector<double>& areas, int ranks) {
  const int chunks = 2 * ranks;
  std::vector<double> sums = {0};
  for (const double area : areas) sums.push_back(sums.back() + area);
  const auto area_of = [&](const std::vector<std::int64_t>& cuts, int chunk) {
    return sums[std::size_t(cuts[std::size_t(chunk) + 1])] -
           sums[std::size_t(cuts[std::size_t(chunk)])];
  };
  std::vector<std::int64_t> best;
  double smallest = -1;
  // Which chunks are longer matters only where there is a rest.
  const int tries = std::int64_t(areas.size()) % chunks == 0 ? 1 : chunks;
  for (int first = 0; first < tries; ++first) {
    std::vector<std::int64_t> cuts = cuts_of(std::int64_t(areas.size()), chunks, first);
    double largest = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      largest = std::max(largest, area_of(cuts, rank) + area_of(cuts, chunks - 1 - rank));
    }
    if (smallest < 0 || largest < smallest) {
      best = std::move(cuts);
      smallest = largest;
    }
  }
  Blocks dealt(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 0; rank < dealt.size(); ++rank) {
    const std::size_t back = std::size_t(chunks) - 1 - rank;
    add_range(dealt[rank], best[rank], best[rank + 1]);
    add_range(dealt[rank], best[back], best[back + 1]);
  }
  return dealt;
}

Blocks deal_greedy(const std::vector<double>& areas, int ranks) {
  const std::size_t least = areas.size() / std::size_t(ranks);
  std::size_t more = areas.size() % std::size_t(ranks);
  Blocks dealt(static_cast<std::size_t>(ranks));
  std::vector<std::int64_t> order(areas.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t one, std::int64_t other) {
    return areas[std::size_t(one)] > areas[std::size_t(other)];
  });
  using Entry = std::pair<double, std::size_t>;  // the area of a rank so far, and the rank
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (std::size_t rank = 0; rank < dealt.size(); ++rank) queue.emplace(0.0, rank);
  for (const std::int64_t block : order) {
    const auto is_full = [&](std::size_t rank) {
      return dealt[rank].size() > least || (dealt[rank].size() == least && more == 0);
    };
    while (is_full(queue.top().second)) queue.pop();
    const auto [area, rank] = queue.top();
    queue.pop();
    if (dealt[rank].size() == least) --more;
    dealt[rank].push_back(block);
    queue.emplace(area + areas[std::size_t(block)], rank);
  }
  for (auto& own : dealt) std::sort(own.begin(), own.end());
  return dealt;
}

}  // namespace regard::distributed
