// Whether tensors share bytes.
//
// Elements of two tensors overlap if a sum of stride * index over the axes of one, less the same
// sum of the other, lies near the distance of their addresses. The search for such indices goes
// from the largest stride to the smallest; nested strides leave two or three values to try on each
// axis.
#include "problem/overlap.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"
#include "problem/tensor_checks.hpp"

namespace regard {
namespace {

constexpr int kMostTerms = 2 * Tensor::kMaxRank;
constexpr int kMostSteps = 500;
constexpr std::int64_t kMostSpan = std::int64_t(1) << 60;

// The bytes from the lowest element to the end of the highest; empty if there are no elements.
struct Reach {
  std::uintptr_t begin = 0;
  std::int64_t size = 0;
};

Reach reach_of(const Tensor& t) {
  std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(t.data);
  const auto element = static_cast<std::int64_t>(size_of(t.type));
  std::int64_t size = element;
  for (std::size_t axis = 0; axis < rank_of(t); ++axis) {
    if (t.sizes[axis] == 0) return {};
    if (t.sizes[axis] == 1) continue;
    const std::int64_t bytes = (t.sizes[axis] - 1) * t.strides[axis] * element;
    size += std::abs(bytes);
    if (bytes < 0) begin += static_cast<std::uintptr_t>(bytes);
  }
  return {begin, size};
}

bool meet(const Reach& a, const Reach& b) {
  if (a.size == 0 || b.size == 0) return false;
  return a.begin < b.begin ? b.begin - a.begin < static_cast<std::uintptr_t>(a.size)
                           : a.begin - b.begin < static_cast<std::uintptr_t>(b.size);
}

// Looks for indices 0 <= n <= most, one for each term, with a sum of step * n in [low, high].
class Search {
 public:
  // Steps of equal size become one: what they reach together is the same.
  void add(const Tensor& t) {
    for (std::size_t axis = 0; axis < rank_of(t); ++axis) {
      const std::int64_t step =
          t.sizes[axis] > 1 ? std::abs(t.strides[axis]) * std::int64_t(size_of(t.type)) : 0;
      if (step == 0) continue;
      std::size_t at = 0;
      while (at < count_ && terms_[at].step > step) ++at;
      if (at == count_ || terms_[at].step != step) {
        std::copy_backward(&terms_[at], &terms_[count_], &terms_[count_ + 1]);
        ++count_;
        terms_[at] = {.step = step};
      }
      terms_[at].most += t.sizes[axis] - 1;
    }
  }

  Overlap find(std::int64_t low, std::int64_t high) {
    std::int64_t rest = 0, divisor = 0;
    for (std::size_t at = count_; at-- > 0;) {
      terms_[at].rest = rest;
      rest += terms_[at].step * terms_[at].most;
      terms_[at].divisor = divisor = std::gcd(divisor, terms_[at].step);
    }
    return find_from(0, low, high);
  }

 private:
  struct Term {
    std::int64_t step = 0, most = 0;
    std::int64_t rest = 0;     // what the terms after this one reach at most
    std::int64_t divisor = 0;  // of this step and theirs
  };

  Overlap find_from(std::size_t at, std::int64_t low, std::int64_t high) {
    low = std::max<std::int64_t>(low, 0);
    if (low > high) return Overlap::none;
    if (low == 0) return Overlap::some;
    if (at == count_) return Overlap::none;
    const Term& term = terms_[at];
    if (high / term.divisor * term.divisor < low) return Overlap::none;
    std::int64_t n = low > term.rest ? (low - term.rest + term.step - 1) / term.step : 0;
    const std::int64_t last = std::min(term.most, high / term.step);
    for (; n <= last; ++n) {
      if (++steps_ > kMostSteps) return Overlap::unproven;
      const Overlap found = find_from(at + 1, low - n * term.step, high - n * term.step);
      if (found != Overlap::none) return found;
    }
    return Overlap::none;
  }

  std::array<Term, kMostTerms + 1> terms_;
  std::size_t count_ = 0;
  int steps_ = 0;
};

// Searches two tensors, whose ranges of bytes meet, for common bytes.
Overlap search(const Tensor& a, const Reach& reach_a, const Tensor& b, const Reach& reach_b) {
  if (reach_a.size > kMostSpan || reach_b.size > kMostSpan) return Overlap::unproven;
  Search search;
  search.add(a);
  search.add(b);
  // The lowest element of a and the highest of b have index 0 on every axis. From there every step
  // moves a's element up or b's down.
  const auto size_a = std::int64_t(size_of(a.type)), size_b = std::int64_t(size_of(b.type));
  const auto highest_b = std::int64_t(reach_b.begin - reach_a.begin) + reach_b.size - size_b;
  return search.find(highest_b - size_a + 1, highest_b + size_b - 1);
}

}  // namespace

Overlap overlap_of(const Tensor& a, const Tensor& b) {
  const Reach reach_a = reach_of(a), reach_b = reach_of(b);
  return meet(reach_a, reach_b) ? search(a, reach_a, b, reach_b) : Overlap::none;
}

void check_overlap(const char* name, const Tensor& tensor) {
  struct Axis {
    std::int64_t stride, size;
  };
  std::array<Axis, Tensor::kMaxRank> axes;  // in ascending order of their strides
  std::size_t count = 0;
  for (std::size_t axis = 0; axis < rank_of(tensor); ++axis) {
    if (tensor.sizes[axis] == 0) return;
    if (tensor.sizes[axis] == 1) continue;
    const std::int64_t stride = std::abs(tensor.strides[axis]);
    std::size_t at = count++;
    for (; at > 0 && axes[at - 1].stride > stride; --at) axes[at] = axes[at - 1];
    axes[at] = {stride, tensor.sizes[axis]};
  }
  std::int64_t span = 1;
  for (std::size_t at = 0; at < count; ++at) {
    require(axes[at].stride >= span, name, tensor,
            "is written to, so its elements must not overlap, and its strides must nest");
    span += (axes[at].size - 1) * axes[at].stride;
  }
}

void check_distinct(std::initializer_list<NamedTensor> outputs, const Attention& a,
                    std::initializer_list<NamedTensor> more_inputs) {
  struct Named {
    NamedTensor tensor;
    Reach reach;
  };
  constexpr std::size_t kMostTensors = 32;
  std::array<Named, kMostTensors> all;
  std::size_t count = 0;
  const auto add = [&](const NamedTensor& t) {
    if (t.second->given()) all.at(count++) = {t, reach_of(*t.second)};
  };
  const VisibleTensors visible = visible_tensors(a);
  const Tensor seed(const_cast<std::uint32_t*>(a.dropout.seed_words), i32, {2});
  for (const NamedTensor& t : outputs) add(t);
  const std::size_t written = count;
  for (const NamedTensor& t : more_inputs) add(t);
  for (const NamedTensor& t : {NamedTensor{"q", &a.q},
                               {"k", &a.k},
                               {"v", &a.v},
                               {"bias", &a.bias},
                               {"mask", &visible.mask},
                               {"row_spans", &visible.row_spans},
                               {"key_spans", &visible.key_spans},
                               {"alibi_slopes", &a.alibi_slopes},
                               {"sink", &a.sink},
                               {"cu_seqlens_q", &a.cu_seqlens_q},
                               {"cu_seqlens_k", &a.cu_seqlens_k},
                               {"seqused_q", &a.seqused_q},
                               {"seqused_k", &a.seqused_k},
                               {"q_positions", &a.q_positions}}) {
    add(t);
  }
  if (a.dropout.p > 0 && seed.data) add({"dropout.seed_words", &seed});
  for (std::size_t n = 0; n < written; ++n) {
    for (std::size_t other = n + 1; other < count; ++other) {
      if (!meet(all[n].reach, all[other].reach)) continue;
      const auto& [name, tensor] = all[n].tensor;
      const auto& [other_name, other_tensor] = all[other].tensor;
      const Overlap found = search(*tensor, all[n].reach, *other_tensor, all[other].reach);
      if (found == Overlap::none) continue;
      refuse(name, *tensor,
             found == Overlap::some
                 ? std::string("must not share its memory with ") + other_name
                 : std::string("lies within the reach of ") + other_name +
                       ", and their strides do not prove that no memory is shared");
    }
  }
}

void check_distinct(const Attention& a, const ForwardOutputs& to) {
  check_distinct({{"out", &to.out}, {"lse", &to.lse}}, a);
}

void check_distinct(const Attention& a, const BackwardInputs& from, const Gradients& to) {
  check_distinct(
      {{"dq", &to.dq}, {"dk", &to.dk}, {"dv", &to.dv}, {"dbias", &to.dbias}, {"dsink", &to.dsink}},
      a,
      {{"out", &from.out},
       {"lse", &from.lse},
       {"dout", &from.dout},
       {"dlse", &from.dlse},
       {"delta", &from.delta}});
}

}  // namespace regard
