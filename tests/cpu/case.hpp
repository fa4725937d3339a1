// A random attention problem in guarded memory, and the same one in float64 as its judge.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "regard/regard.hpp"
#include "tests/cpu/guarded.hpp"

namespace regard::tests {

struct Settings {
  Type type = f32;
  std::int64_t batch = 1, heads_q = 1, heads_kv = 1, len_q = 5, len_k = 7, dim = 8, dim_v = 8;
  Causal causal = Causal::none;
  Window window{};
  double softcap = 0;
  std::optional<double> scale{};
  Type bias = Type::none;
  std::array<bool, 4> bias_broadcast{};
  bool mask = false, alibi = false, sink = false;
  std::array<bool, 4> mask_broadcast{};
  bool mask_reversed = false;  // its last element comes first in memory
  std::int64_t mask_tile = 0;  // > 0: mask and bias hide or show most tiles of this side as a whole
  double dropout = 0;
  bool packed = false;   // sequences of random lengths up to len_q and len_k
  bool seqused = false;  // random lengths of padded sequences
  bool dlse = false, accumulate = false;
  bool wide_results = false;  // f32 out and gradients, and a dout of f32
  bool narrow_dout = false;   // which then has the type of q
  bool gaps = false;          // between the rows of every tensor
  double value_shift = 0;     // added to v
  std::uint64_t seed = 1;
};

std::string to_string(const Settings&);

// The feature bits of `choice` switch the features on one by one.
constexpr int kFeatureCount = 12;
Settings with_features(Settings, unsigned choice);

// A number in [0, 1) for each (seed, stream, n).
double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t n);

// Every tensor of the problem. `exact` holds the very same values, and computes, in float64.
struct Case {
  enum class Values : bool { as_asked, exact };

  explicit Case(const Settings&, Values = Values::as_asked);

  Attention attention() const;
  ForwardOutputs outputs() const { return {.out = out, .lse = lse}; }
  BackwardInputs inputs() const;
  Gradients gradients() const;

  void forward(const Run& run = {}) const;
  void backward(const Run& run = {}) const;
  void both(const Run& run = {}) const;

  std::vector<const Array*> results() const { return {&out, &lse, &dq, &dk, &dv, &dbias, &dsink}; }
  std::vector<const Array*> every() const;
  std::string result_bytes() const;

  Settings s;
  Array q, k, v, bias, mask, slopes, sink, begins_q, begins_k, used_q, used_k;
  Array out, lse, dout, dlse, dq, dk, dv, dbias, dsink;
};

// The names of Case::results, in their order.
inline constexpr const char* kResultNames[] = {"out", "lse", "dq", "dk", "dv", "dbias", "dsink"};

// How far each result may lie from float64, per row (row_error).
double tolerance(Type type);

// Runs forward and backward on `run` and in float64 by the reference; checks every result, and that
// nothing was written between elements. Returns what is wrong, empty if nothing.
std::string disagreement(const Settings&, const Run& run = {});

}  // namespace regard::tests
