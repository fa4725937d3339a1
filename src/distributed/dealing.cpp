#include "distributed/dealing.hpp"

#include <algorithm>
#include <cmath>
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

Blocks deal_by_area(const std::vector<double>& areas, int ranks) {
  std::vector<double> sums = {0};
  for (const double area : areas) sums.push_back(sums.back() + area);
  if (sums.back() == 0) return deal_contiguous(std::int64_t(areas.size()), ranks);
  Blocks dealt(static_cast<std::size_t>(ranks));
  auto begin = sums.begin();
  for (int rank = 0; rank < ranks; ++rank) {
    const double share = sums.back() * (rank + 1) / ranks;
    auto end = rank + 1 == ranks ? sums.end() - 1 : std::lower_bound(begin, sums.end(), share);
    const bool is_nearer = rank + 1 < ranks && end > begin && share - *(end - 1) <= *end - share;
    end -= is_nearer;
    add_range(dealt[std::size_t(rank)], begin - sums.begin(), end - sums.begin());
    begin = end;
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

namespace {

// Neighbouring blocks with one label, those with the most area a block first.
std::vector<std::vector<std::int64_t>> groups_of(const std::vector<double>& areas,
                                                 const std::vector<std::int64_t>& labels) {
  std::vector<std::vector<std::int64_t>> groups;
  for (std::size_t block = 0; block < areas.size(); ++block) {
    if (block == 0 || labels[block] != labels[block - 1]) groups.emplace_back();
    groups.back().push_back(std::int64_t(block));
  }
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t n = 0; n < groups.size(); ++n) {
    order.emplace_back(-area_of(areas, groups[n]) / double(groups[n].size()), n);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::vector<std::int64_t>> sorted;
  for (const auto& [density, n] : order) sorted.push_back(std::move(groups[n]));
  return sorted;
}

// Blocks go to the rank with the least area among a few that have room.
class Dealer {
 public:
  Dealer(std::size_t blocks, int ranks)
      : dealt_(std::size_t(ranks)), areas_(std::size_t(ranks)), room_(std::size_t(ranks)) {
    for (std::size_t rank = 0; rank < room_.size(); ++rank) {
      room_[rank] = blocks / room_.size() + (rank < blocks % room_.size());
    }
  }

  // The `count` ranks with the least area, of those with room.
  std::vector<std::size_t> lightest(std::size_t count) const {
    std::vector<std::pair<double, std::size_t>> ranks;
    for (std::size_t rank = 0; rank < room_.size(); ++rank) {
      if (room_[rank] > 0) ranks.emplace_back(areas_[rank], rank);
    }
    count = std::min(count, ranks.size());
    std::partial_sort(ranks.begin(), ranks.begin() + std::ptrdiff_t(count), ranks.end());
    std::vector<std::size_t> found;
    for (std::size_t n = 0; n < count; ++n) found.push_back(ranks[n].second);
    return found;
  }

  void deal(std::int64_t block, double area, std::vector<std::size_t>& among, std::size_t count) {
    std::erase_if(among, [&](std::size_t rank) { return room_[rank] == 0; });
    if (among.empty()) among = lightest(count);
    const std::size_t rank =
        *std::min_element(among.begin(), among.end(), [&](std::size_t one, std::size_t other) {
          return std::pair(areas_[one], one) < std::pair(areas_[other], other);
        });
    dealt_[rank].push_back(block);
    areas_[rank] += area;
    --room_[rank];
  }

  Blocks dealt() && {
    for (auto& own : dealt_) std::sort(own.begin(), own.end());
    return std::move(dealt_);
  }

 private:
  Blocks dealt_;
  std::vector<double> areas_;
  std::vector<std::size_t> room_;
};

}  // namespace

double area_of(const std::vector<double>& areas, const std::vector<std::int64_t>& blocks) {
  double sum = 0;
  for (const std::int64_t block : blocks) sum += areas[std::size_t(block)];
  return sum;
}

Blocks deal_documents(const std::vector<double>& areas, const std::vector<std::int64_t>& labels,
                      int ranks, double shares) {
  const double total = std::accumulate(areas.begin(), areas.end(), 0.0);
  const double mean = total > 0 ? total / ranks : 1;
  const double least = std::max(1.0, double(std::int64_t(areas.size()) / ranks));
  Dealer dealer(areas.size(), ranks);
  for (std::vector<std::int64_t>& blocks : groups_of(areas, labels)) {
    const double needed = std::max(double(blocks.size()) / least, area_of(areas, blocks) / mean);
    const auto count = std::size_t(std::ceil(std::ceil(needed) * shares));
    std::stable_sort(blocks.begin(), blocks.end(), [&](std::int64_t one, std::int64_t other) {
      return areas[std::size_t(one)] > areas[std::size_t(other)];
    });
    std::vector<std::size_t> among = dealer.lightest(count);
    for (const std::int64_t block : blocks) {
      dealer.deal(block, areas[std::size_t(block)], among, count);
    }
  }
  return std::move(dealer).dealt();
}

}  // namespace regard::distributed
