#include "plan/cuda/possible_calls.hpp"

#include <initializer_list>

namespace regard {
namespace {

// Tensors whose addresses are aligned together or not: whether one of them is null, and the same
// problem where it lies at an odd element.
struct Group {
  bool (*is_open)(const Problem&);
  void (*move)(Problem&);
};

void* odd_address() { return reinterpret_cast<void*>(2); }

void move(View& x) {
  if (x.given() && !x.data) x.data = odd_address();
}

// Outputs that are not named yet have q's strides, which are as good as any.
void move_outputs(Problem& p) {
  for (View* x : {&p.out, &p.dq, &p.dk, &p.dv}) move(*x);
  if (!p.backward && !p.out.given()) {
    p.out = p.q;
    p.out.data = odd_address();
  }
}

bool is_open(const View& x) { return x.given() && !x.data; }

constexpr Group kGroups[] = {
    {[](const Problem& p) { return is_open(p.q); },
     [](Problem& p) {
       for (View* x : {&p.q, &p.k, &p.v, &p.dout}) move(*x);
     }},
    {[](const Problem& p) {
       return (!p.backward && !p.out.given()) || is_open(p.out) || is_open(p.dq) || is_open(p.dk) ||
              is_open(p.dv);
     },
     move_outputs},
    {[](const Problem& p) { return is_open(p.bias); }, [](Problem& p) { move(p.bias); }},
    {[](const Problem& p) { return is_open(p.dbias); }, [](Problem& p) { move(p.dbias); }},
    {[](const Problem& p) { return is_open(p.mask); }, [](Problem& p) { move(p.mask); }},
};

Problem with_named_gradients(const Problem& p, bool with_dbias) {
  Problem named = p;
  named.gradients_named = true;
  const auto like = [](View x) {
    x.data = nullptr;
    return x;
  };
  named.dq = like(p.q);
  named.dk = like(p.k);
  named.dv = like(p.v);
  named.dsink = like(p.sink);
  if (with_dbias) named.dbias = like(p.bias);
  return named;
}

}  // namespace

std::vector<Problem> possible_calls(const Problem& p) {
  std::vector<Problem> calls{p};
  if (p.backward && !p.gradients_named) {
    for (const bool with_dbias : {true, false}) {
      if (with_dbias || p.features.bias) calls.push_back(with_named_gradients(p, with_dbias));
    }
  }
  for (const Group& group : kGroups) {
    for (std::size_t n = 0, known = calls.size(); n < known; ++n) {
      if (!group.is_open(calls[n])) continue;
      calls.push_back(calls[n]);
      group.move(calls.back());
    }
  }
  calls.erase(calls.begin());
  return calls;
}

}  // namespace regard
