// Plans: from sizes and a mask to the rows of each rank, with the reasons for what was chosen.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "distributed/costs.hpp"
#include "distributed/heads.hpp"
#include "distributed/plan_contents.hpp"
#include "distributed/visibility.hpp"
#include "plan/count.h"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

constexpr std::int64_t kMostSize = std::numeric_limits<std::int32_t>::max();
constexpr int kMostRanks = 4096;

// ----------------------------------------------------------------------------------- what is asked

void require_size(const char* name, std::int64_t value, std::int64_t least) {
  require(value >= least && value <= kMostSize, name, value,
          least > 0 ? "must be from 1 to 2^31 - 1" : "must be from 0 to 2^31 - 1");
}

void require_documents(const WholeSequence& whole) {
  const auto& cuts = whole.cu_seqlens;
  if (cuts.empty()) return;
  require(cuts.size() > 1, "cu_seqlens", cuts.front(), "must have n + 1 numbers, n from 1 on");
  require(cuts.front() == 0, "cu_seqlens[0]", cuts.front(), "must be 0");
  for (std::size_t n = 1; n < cuts.size(); ++n) {
    if (cuts[n] >= cuts[n - 1]) continue;
    refuse(("cu_seqlens[" + std::to_string(n) + "]").c_str(), cuts[n], "must not descend");
  }
  if (cuts.back() > whole.length) {
    refuse("length", whole.length,
           "must not be below the end of cu_seqlens, " + std::to_string(cuts.back()));
  }
}

// The same with every size given.
WholeSequence checked(WholeSequence whole) {
  if (whole.heads_kv == 0) whole.heads_kv = whole.heads_q;
  if (whole.head_size_v == 0) whole.head_size_v = whole.head_size;
  require_size("length", whole.length, 1);
  require_size("batch", whole.batch, 0);
  require_size("heads_q", whole.heads_q, 1);
  require_size("heads_kv", whole.heads_kv, 1);
  require_size("head_size", whole.head_size, 1);
  require_size("head_size_v", whole.head_size_v, 1);
  if (whole.heads_q % whole.heads_kv != 0) {
    refuse("heads_q", whole.heads_q,
           "must be a multiple of heads_kv, " + std::to_string(whole.heads_kv));
  }
  const Type t = whole.type;
  require(t <= Type::i32, "type", int(t), "is no such type");
  require(t == Type::f64 || t == Type::f32 || t == Type::f16 || t == Type::bf16, "type", t,
          "must be f64, f32, f16 or bf16");
  require(whole.causal <= Causal::bottom_right, "causal", int(whole.causal),
          "is no such alignment");
  require(whole.window.left >= -1, "window.left", whole.window.left, "must be -1 or more");
  require(whole.window.right >= -1, "window.right", whole.window.right, "must be -1 or more");
  require_documents(whole);
  return whole;
}

// ------------------------------------------------------------------------------------ what is made

std::vector<double> areas_of_blocks(const WholeSequence& whole) {
  const Visibility visibility(whole);
  std::vector<double> areas(std::size_t(divide_up(whole.length, kBlock)));
  for (std::size_t block = 0; block < areas.size(); ++block) {
    const std::int64_t begin = std::int64_t(block) * kBlock;
    visibility.for_each_document(
        {begin, std::min(whole.length, begin + kBlock)},
        [&](const Rows& rows) { areas[block] += double(visibility.pairs_of(rows)); });
  }
  return areas;
}

// The blocks of keys that the rows of these blocks see, and these blocks.
std::vector<bool> blocks_needed(const WholeSequence& whole, const std::vector<std::int64_t>& own) {
  const Visibility visibility(whole);
  const std::int64_t count = divide_up(whole.length, kBlock);
  std::vector<int> edges(std::size_t(count) + 1);  // where intervals begin, less where they end
  const auto add = [&](std::int64_t first, std::int64_t last) {
    ++edges[std::size_t(first)];
    --edges[std::size_t(last) + 1];
  };
  for (const std::int64_t block : own) {
    add(block, block);
    const std::int64_t end = std::min(whole.length, (block + 1) * kBlock);
    visibility.for_each_document({block * kBlock, end}, [&](const Rows& rows) {
      // Each row sees itself, so that no key between the first and the last one is left out.
      add(visibility.seen_by(rows.begin).begin / kBlock,
          (visibility.seen_by(rows.end - 1).end - 1) / kBlock);
    });
  }
  std::vector<bool> needed(static_cast<std::size_t>(count));
  int open = 0;
  for (std::size_t block = 0; block < needed.size(); ++block) {
    open += edges[block];
    needed[block] = open > 0;
  }
  return needed;
}

// The first key that each block's last row sees, if neighbouring blocks mostly share it, as those
// of a packed document do; else nothing.
std::vector<std::int64_t> document_labels(const WholeSequence& whole) {
  const Visibility visibility(whole);
  const std::int64_t behind_all = whole.cu_seqlens.empty() ? whole.length : whole.cu_seqlens.back();
  std::vector<std::int64_t> labels;
  std::size_t changes = 0;
  for (std::int64_t end = kBlock; end < whole.length + kBlock; end += kBlock) {
    const std::int64_t first = visibility.seen_by(std::min(end, whole.length) - 1).begin;
    const std::int64_t label = std::min(first, behind_all);
    changes += !labels.empty() && label != labels.back();
    labels.push_back(label);
  }
  if (2 * changes >= labels.size()) labels.clear();
  return labels;
}

// Over as few ranks for a document as make areas even.
Blocks deal_by_documents(const std::vector<double>& areas, const std::vector<std::int64_t>& labels,
                         int ranks) {
  constexpr double kEven = 1.08;  // the largest area over the mean that is even enough
  const double mean = std::accumulate(areas.begin(), areas.end(), 0.0) / ranks;
  Blocks best;
  double smallest = std::numeric_limits<double>::infinity();
  for (const double shares : {1.0, 1.5, 2.0, 3.0}) {
    Blocks blocks = deal_documents(areas, labels, ranks, shares);
    double largest = 0;
    for (const auto& own : blocks) largest = std::max(largest, area_of(areas, own));
    if (largest >= smallest) continue;
    smallest = largest;
    best = std::move(blocks);
    if (largest <= kEven * mean) break;
  }
  return best;
}

void deal(PlanContents& plan, const std::vector<double>& areas) {
  const Visibility visibility(plan.whole);
  const bool by_heads = plan.scheme == Scheme::ulysses;
  if (plan.scheme == Scheme::halo && plan.counts == RowCounts::by_area) {
    plan.dealing = Dealing::contiguous_by_area;
    plan.blocks = deal_by_area(areas, plan.ranks);
    plan.reasons.push_back("contiguous rows, cut where areas are even: near keys have few owners");
  } else if (plan.scheme == Scheme::halo || by_heads || visibility.shows_all()) {
    plan.dealing = Dealing::contiguous;
    plan.blocks = deal_contiguous(std::int64_t(areas.size()), plan.ranks);
    plan.reasons.push_back(plan.scheme == Scheme::halo
                               ? "contiguous rows: near keys have few owners"
                           : by_heads ? "contiguous rows: each rank has all rows of its heads"
                                      : "contiguous rows: all rows see as many keys");
  } else if (visibility.is_plain_causal()) {
    plan.dealing = Dealing::zigzag;
    plan.blocks = deal_zigzag(areas, plan.ranks);
    plan.reasons.push_back("zigzag rows: late rows of a causal mask see more keys");
  } else if (const auto labels = document_labels(plan.whole); !labels.empty()) {
    plan.dealing = Dealing::documents;
    plan.blocks = deal_by_documents(areas, labels, plan.ranks);
    plan.reasons.push_back("rows by documents: each has few owners, and areas are even");
  } else {
    plan.dealing = Dealing::greedy;
    plan.blocks = deal_greedy(areas, plan.ranks);
    plan.reasons.push_back("greedy rows: blocks of rows differ in visible pairs");
  }
}

// Visible pairs and needed keys of a rank's rows.
void look_by_rows(PlanContents& plan, const std::vector<double>& areas) {
  for (const auto& own : plan.blocks) {
    plan.areas.push_back(area_of(areas, own));
    plan.needs.push_back(blocks_needed(plan.whole, own));
  }
}

// Sets the visible pairs and the needed keys of each rank's heads.
void look_by_heads(PlanContents& plan, const std::vector<double>& areas) {
  const double all = std::accumulate(areas.begin(), areas.end(), 0.0);
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::int64_t own = size_of_range(query_heads(plan.whole, plan.ranks, rank));
    plan.areas.push_back(all * double(own) / double(plan.whole.heads_q));
    plan.needs.emplace_back(areas.size(), own > 0);
  }
}

PlanContents of_scheme(const WholeSequence& whole, int ranks, Scheme scheme, RowCounts counts,
                       const std::vector<double>& areas) {
  PlanContents plan{.whole = whole, .ranks = ranks, .scheme = scheme, .counts = counts};
  deal(plan, areas);
  for (const auto& own : plan.blocks) {
    auto& first = plan.first_positions.emplace_back();
    for (const std::int64_t block : own) first.push_back(std::int32_t(block * kBlock));
  }
  scheme == Scheme::ulysses ? look_by_heads(plan, areas) : look_by_rows(plan, areas);
  for (int rank = 0; rank < ranks; ++rank) plan.moved.push_back(moved_of(plan, rank));
  return plan;
}

// The fastest of the schemes that can save something with this mask and these heads; of equals the
// first.
PlanContents fastest(const WholeSequence& whole, int ranks, const Rates& rates, RowCounts counts,
                     const std::vector<double>& areas) {
  const Visibility visibility(whole);
  PlanContents best = of_scheme(whole, ranks, Scheme::gather, counts, areas);
  if (ranks == 1) {
    best.reasons = {"one rank: nothing moves"};
    return best;
  }
  std::vector<Scheme> others;
  if (!visibility.shows_all() && !visibility.is_plain_causal()) others.push_back(Scheme::halo);
  if (whole.heads_q >= ranks) others.push_back(Scheme::ulysses);
  if (others.empty()) {
    best.reasons.push_back(
        "gather: rows see far keys, so that halo has nothing to save, and there are fewer query "
        "heads than ranks");
    return best;
  }
  const auto text = [](double s) { return printed(1e3 * s) + " ms"; };
  double least = seconds(best, rates);
  std::string times = "gather " + text(least);
  for (const Scheme scheme : others) {
    PlanContents one = of_scheme(whole, ranks, scheme, counts, areas);
    const double time = seconds(one, rates);
    times += std::string(", ") + name_of(scheme) + " " + text(time);
    if (time >= least) continue;
    least = time;
    best = std::move(one);
  }
  best.reasons.push_back(std::string(name_of(best.scheme)) +
                         ": the least time of a forward and backward pass by the rates: " + times);
  return best;
}

}  // namespace

std::int64_t PlanContents::rows_of_block(std::int64_t block) const {
  return std::min(kBlock, whole.length - block * kBlock);
}

std::int64_t PlanContents::rows(int rank) const {
  const auto& own = blocks[std::size_t(rank)];
  if (own.empty()) return 0;
  return std::int64_t(own.size() - 1) * kBlock + rows_of_block(own.back());
}

double PlanContents::balance() const {
  const double total = std::accumulate(areas.begin(), areas.end(), 0.0);
  return total > 0 ? *std::max_element(areas.begin(), areas.end()) * ranks / total : 1;
}

Overlap PlanContents::overlap() const {
  const bool has_choice =
      ranks > 1 && whole.heads_kv > 1 && (scheme == Scheme::gather || scheme == Scheme::halo);
  return has_choice ? asked_overlap : Overlap::none;
}

Rows PlanContents::keys(int rank) const {
  const std::vector<bool>& needed = needs[std::size_t(rank)];
  const auto first = std::find(needed.begin(), needed.end(), true);
  if (first == needed.end()) return {};
  const auto last = std::find(needed.rbegin(), needed.rend(), true);
  const std::int64_t end = (needed.rend() - last) * kBlock;
  return {(first - needed.begin()) * kBlock, std::min(end, whole.length)};
}

std::vector<Rows> PlanContents::runs(int owner, int reader) const {
  const std::vector<bool>& needed = needs[std::size_t(reader)];
  std::vector<Rows> found;
  for (const std::int64_t block : blocks[std::size_t(owner)]) {
    if (!needed[std::size_t(block)]) continue;
    const std::int64_t begin = block * kBlock, end = begin + rows_of_block(block);
    if (!found.empty() && found.back().end == begin) {
      found.back().end = end;
    } else {
      found.push_back({begin, end});
    }
  }
  return found;
}

namespace {

PlanContents made_plan(const WholeSequence& asked, int ranks, Scheme scheme, const Rates& rates,
                       RowCounts counts) {
  const WholeSequence whole = checked(asked);
  require(ranks >= 1 && ranks <= kMostRanks, "ranks", ranks, "must be from 1 to 4096");
  require(rates.flops > 0 && std::isfinite(rates.flops), "rates.flops", rates.flops,
          "must be finite and above 0");
  require(rates.bytes_per_second > 0 && std::isfinite(rates.bytes_per_second),
          "rates.bytes_per_second", rates.bytes_per_second, "must be finite and above 0");
  // What is given decides: the same window may hide nothing of a shorter sequence.
  const Window& window = whole.window;
  const bool is_near = window.left >= 0 || (whole.causal == Causal::none && window.right >= 0);
  if (scheme == Scheme::halo && whole.cu_seqlens.empty() && !is_near) {
    refuse("scheme", "halo", "needs a window or cu_seqlens, so that rows see near keys only",
           Code::unsupported);
  }
  const std::vector<double> areas = areas_of_blocks(whole);
  if (scheme == Scheme::automatic) {
    return fastest(whole, ranks, rates, counts, areas);
  }
  PlanContents made = of_scheme(whole, ranks, scheme, counts, areas);
  made.reasons.push_back(std::string(name_of(scheme)) + ": as asked for");
  return made;
}

}  // namespace

Plan plan(const WholeSequence& asked, int ranks, Scheme scheme, const Rates& rates,
          RowCounts counts, Overlap overlap) {
  require(scheme <= Scheme::ring, "scheme", int(scheme), "is no such scheme");
  require(counts <= RowCounts::by_area, "counts", int(counts), "are no such counts of rows");
  require(overlap <= Overlap::heads, "overlap", int(overlap), "is no such overlap");
  return with_memory_errors([&] {
    PlanContents made = made_plan(asked, ranks, scheme, rates, counts);
    made.asked_overlap = overlap;
    return PlanContents::to_plan(std::move(made));
  });
}

// -------------------------------------------------------------------------------- what a Plan says

namespace {

std::size_t checked_rank(const PlanContents& plan, int rank) {
  if (rank < 0 || rank >= plan.ranks) {
    refuse("rank", rank, "the plan is for " + std::to_string(plan.ranks) + " ranks");
  }
  return std::size_t(rank);
}

}  // namespace

const WholeSequence& Plan::whole() const { return contents_->whole; }
int Plan::ranks() const { return contents_->ranks; }
Scheme Plan::scheme() const { return contents_->scheme; }
Dealing Plan::dealing() const { return contents_->dealing; }
Overlap Plan::overlap() const { return contents_->overlap(); }

const std::vector<std::int64_t>& Plan::blocks(int rank) const {
  return contents_->blocks[checked_rank(*contents_, rank)];
}

std::int64_t Plan::rows(int rank) const {
  return contents_->rows(int(checked_rank(*contents_, rank)));
}

std::vector<std::int64_t> Plan::positions(int rank) const {
  std::vector<std::int64_t> found;
  for (const std::int64_t block : blocks(rank)) {
    for (std::int64_t row = 0; row < contents_->rows_of_block(block); ++row) {
      found.push_back(block * kBlock + row);
    }
  }
  return found;
}

const std::vector<std::int32_t>& Plan::first_positions(int rank) const {
  return contents_->first_positions[checked_rank(*contents_, rank)];
}

Rows Plan::keys(int rank) const { return contents_->keys(int(checked_rank(*contents_, rank))); }

std::vector<Rows> Plan::runs(int owner, int reader) const {
  checked_rank(*contents_, owner);
  checked_rank(*contents_, reader);
  return contents_->runs(owner, reader);
}

double Plan::area(int rank) const { return contents_->areas[checked_rank(*contents_, rank)]; }
double Plan::balance() const { return contents_->balance(); }
Moved Plan::moved(int rank) const { return contents_->moved[checked_rank(*contents_, rank)]; }
std::string Plan::explain() const { return contents_->explain(); }

}  // namespace regard::distributed
