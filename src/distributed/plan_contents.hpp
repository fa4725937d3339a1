// What a Plan holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distributed/dealing.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

struct PlanContents {
  WholeSequence whole{};
  int ranks = 1;
  Scheme scheme = Scheme::gather;
  RowCounts counts = RowCounts::equal;  // asked for
  Overlap asked_overlap = Overlap::none;
  Dealing dealing = Dealing::contiguous;
  std::vector<std::string> reasons{};

  // Indexed by rank.
  Blocks blocks{};
  std::vector<std::vector<std::int32_t>> first_positions{};
  std::vector<double> areas{};
  // Which blocks of keys its call needs: those that its rows see, and its own.
  std::vector<std::vector<bool>> needs{};
  std::vector<Moved> moved{};

  std::int64_t rows_of_block(std::int64_t block) const;
  std::int64_t rows(int rank) const;
  double balance() const;
  Overlap overlap() const;
  Rows keys(int rank) const;
  std::vector<Rows> runs(int owner, int reader) const;
  std::string title() const;    // in one line
  std::string explain() const;  // plan_text.cpp

  static Plan to_plan(PlanContents contents) {
    Plan plan;
    plan.contents_ = std::make_shared<const PlanContents>(std::move(contents));
    return plan;
  }
  static const PlanContents& of(const Plan& plan) { return *plan.contents_; }
};

const char* name_of(Scheme);
const char* name_of(Dealing);

}  // namespace regard::distributed
