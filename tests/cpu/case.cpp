// A random attention problem in guarded memory, and the same one in float64 as its judge.
#include "tests/cpu/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace regard::tests {
namespace {

using Sizes = std::vector<std::int64_t>;

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Lengths of the sequences: the first is as long as allowed.
Sizes lengths(const Settings& s, std::int64_t longest, std::uint64_t stream) {
  Sizes list;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    list.push_back(b == 0 ? longest
                          : std::int64_t(uniform(s.seed, stream, b) * double(longest + 1)));
  }
  return list;
}

// The size of the terms that an element of the result is a sum of. A gradient may cancel to nothing
// (P (dP - delta) of a lone key, or summed over all keys), and its error is then that of its terms.
double natural_size(const Settings& s, std::size_t result) {
  const double term = 0.1 + 0.1 * std::sqrt(double(s.dim_v)), rows = double(s.len_q),
               keys = double(std::max<std::int64_t>(1, s.len_k));
  switch (result) {
    case 1:
    case 2:
      return term;
    case 3:
      return term * rows * double(s.heads_q / s.heads_kv) / keys;
    case 5: {
      double summed = s.bias_broadcast[3] ? 1 : 1 / keys;
      const double sizes[] = {double(s.batch), double(s.heads_q), rows};
      for (int axis = 0; axis < 3; ++axis) summed *= s.bias_broadcast[axis] ? sizes[axis] : 1;
      return term * summed;
    }
    case 6:
      return term * double(s.batch) * rows / keys;
    default:
      return 0;
  }
}

// Whether element n of a mask or bias shows its pair: at random, and with mask_tile in whole tiles.
bool shows(const Settings& s, const Sizes& sizes, std::int64_t n, std::uint64_t stream,
           double chance) {
  const bool alone = uniform(s.seed, stream, std::uint64_t(n)) < chance;
  if (s.mask_tile == 0) return alone;
  const std::int64_t column = n % sizes[3], row = n / sizes[3];
  const std::int64_t tile = row / s.mask_tile * sizes[3] + column / s.mask_tile;
  const double kind = uniform(s.seed, stream + 20, std::uint64_t(tile));
  return kind < 0.4 ? false : kind < 0.7 ? true : alone;
}

Array table_of(const Sizes& values) {
  Array array(i32, {std::int64_t(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) array.set(n, double(values[n]));
  return array;
}

Sizes running_sums(const Sizes& values) {
  Sizes sums{0};
  for (std::int64_t value : values) sums.push_back(sums.back() + value);
  return sums;
}

// The same memory from its last element on. Of booleans: strides are bytes.
Tensor reversed(Tensor tensor) {
  auto* first = static_cast<char*>(tensor.data);
  for (std::size_t axis = 0; axis < std::size_t(tensor.rank); ++axis) {
    first += (tensor.sizes[axis] - 1) * tensor.strides[axis];
    tensor.strides[axis] = -tensor.strides[axis];
  }
  tensor.data = first;
  return tensor;
}

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t n) {
  return double(mixed(mixed(mixed(seed) + stream) + n) >> 11) * 0x1p-53;
}

Settings with_features(Settings s, unsigned choice) {
  const auto on = [&](int bit) { return (choice >> bit & 1) != 0; };
  if (on(0)) s.causal = Causal::bottom_right;
  if (on(1)) s.window = {s.len_k / 3 + 1, s.len_k / 4};
  if (on(2)) s.softcap = 1.5;
  if (on(3)) s.bias = f32;
  if (on(4)) s.mask = true;
  if (on(5)) s.alibi = true;
  if (on(6)) s.sink = true;
  if (on(7)) s.dropout = 0.3;
  if (on(8)) s.seqused = true;
  if (on(9)) s.dlse = true;
  if (on(10)) s.gaps = true;
  if (on(11)) s.scale = -0.7;
  return s;
}

std::string to_string(const Settings& s) {
  std::ostringstream text;
  text << name_of(s.type) << " " << s.batch << " x " << s.heads_q << "/" << s.heads_kv << ", "
       << s.len_q << " x " << s.len_k << ", D " << s.dim << " Dv " << s.dim_v << ", causal "
       << int(s.causal) << ", window " << s.window.left << " " << s.window.right << ", softcap "
       << s.softcap << ", scale " << s.scale.value_or(0) << ", bias " << name_of(s.bias);
  for (bool broadcast : s.bias_broadcast) text << broadcast;
  text << ", mask " << s.mask;
  for (bool broadcast : s.mask_broadcast) text << broadcast;
  text << (s.mask_reversed ? " reversed" : "") << ", tile " << s.mask_tile << ", alibi " << s.alibi
       << ", sink " << s.sink << ", dropout " << s.dropout << ", packed " << s.packed
       << ", seqused " << s.seqused << ", dlse " << s.dlse << ", accumulate " << s.accumulate
       << ", wide " << s.wide_results << ", narrow dout " << s.narrow_dout << ", gaps " << s.gaps
       << ", seed " << s.seed;
  return text.str();
}

Case::Case(const Settings& settings, Values values) : s(settings) {
  const bool exact = values == Values::exact;
  const Type type = exact ? f64 : s.type;
  const Type result = s.wide_results && !exact ? f32 : type;
  const Type sums = type == f64 ? f64 : f32;
  std::uint64_t stream = 100;
  const auto random = [&](Type as, Type rounding, Sizes sizes, double low, double high) {
    Array array(as, std::move(sizes), s.gaps);
    ++stream;
    for (std::int64_t n = 0; n < array.count(); ++n) {
      array.set(n, rounded(rounding, low + (high - low) * uniform(s.seed, stream, n)));
    }
    return array;
  };
  const Sizes lens_q = lengths(s, s.len_q, 1), lens_k = lengths(s, s.len_k, 2);
  const Sizes sums_q = running_sums(lens_q), sums_k = running_sums(lens_k);
  const auto rows = [&](std::int64_t heads, bool keys, std::int64_t dim) {
    if (s.packed) return Sizes{(keys ? sums_k : sums_q).back(), heads, dim};
    return Sizes{s.batch, heads, keys ? s.len_k : s.len_q, dim};
  };
  const Sizes lse_sizes =
      s.packed ? Sizes{s.heads_q, sums_q.back()} : Sizes{s.batch, s.heads_q, s.len_q};
  q = random(type, s.type, rows(s.heads_q, false, s.dim), -1, 1);
  k = random(type, s.type, rows(s.heads_kv, true, s.dim), -1, 1);
  v = random(type, s.type, rows(s.heads_kv, true, s.dim_v), s.value_shift - 1, s.value_shift + 1);
  const bool wide_dout = s.wide_results && !s.narrow_dout;
  dout = random(wide_dout ? result : type, wide_dout ? Type::f32 : s.type,
                rows(s.heads_q, false, s.dim_v), -1, 1);
  const auto score_sizes = [&](const std::array<bool, 4>& broadcast) {
    Sizes sizes{s.batch, s.heads_q, s.len_q, s.len_k};
    for (std::size_t axis = 0; axis < 4; ++axis) sizes[axis] = broadcast[axis] ? 1 : sizes[axis];
    return sizes;
  };
  if (s.mask) {
    const Sizes sizes = score_sizes(s.mask_broadcast);
    mask = random(boolean, boolean, sizes, 0, 1);
    for (std::int64_t n = 0; n < mask.count(); ++n) mask.set(n, shows(s, sizes, n, 7, 0.7));
  }
  if (s.bias != Type::none) {
    const Sizes sizes = score_sizes(s.bias_broadcast);
    bias = random(exact ? f64 : s.bias, s.bias, sizes, -2, 2);
    for (std::int64_t n = 0; n < bias.count(); ++n) {
      if (!shows(s, sizes, n, 8, 0.9)) bias.set(n, -std::numeric_limits<double>::infinity());
    }
    dbias = random(exact ? f64 : s.bias, s.bias, sizes, -1, 1);
  }
  if (s.alibi) slopes = random(f32, f32, {s.batch, s.heads_q}, 0, 0.1);
  if (s.sink) {
    sink = random(f32, f32, {s.heads_q}, -1, 1);
    dsink = random(f32, f32, {s.heads_q}, -1, 1);
  }
  if (s.packed) {
    begins_q = table_of(sums_q);
    begins_k = table_of(sums_k);
  } else if (s.seqused) {
    used_q = table_of(lens_q);
    used_k = table_of(lens_k);
  }
  if (s.dlse) dlse = random(sums, sums, lse_sizes, -1, 1);
  // What is written holds values before, to be accumulated into or to be left where no row is.
  const Type given = s.wide_results ? f32 : s.type;
  out = random(result, given, rows(s.heads_q, false, s.dim_v), -1, 1);
  lse = random(sums, f32, lse_sizes, -1, 1);
  dq = random(result, given, rows(s.heads_q, false, s.dim), -1, 1);
  dk = random(result, given, rows(s.heads_kv, true, s.dim), -1, 1);
  dv = random(result, given, rows(s.heads_kv, true, s.dim_v), -1, 1);
}

Attention Case::attention() const {
  return {.q = q,
          .k = k,
          .v = v,
          .bias = bias,
          .mask = s.mask_reversed ? reversed(mask) : mask,
          .alibi_slopes = slopes,
          .sink = sink,
          .cu_seqlens_q = begins_q,
          .cu_seqlens_k = begins_k,
          .seqused_q = used_q,
          .seqused_k = used_k,
          .max_seqlen_q = s.packed ? s.len_q : 0,
          .max_seqlen_k = s.packed ? s.len_k : 0,
          .scale = s.scale,
          .softcap = s.softcap,
          .causal = s.causal,
          .window = s.window,
          .dropout = {.p = s.dropout, .seed = s.seed, .offset = 5}};
}

BackwardInputs Case::inputs() const { return {.out = out, .lse = lse, .dout = dout, .dlse = dlse}; }

Gradients Case::gradients() const {
  return {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsink = dsink, .accumulate = s.accumulate};
}

void Case::forward(const Run& run) const { regard::forward(attention(), outputs(), run); }
void Case::backward(const Run& run) const {
  regard::backward(attention(), inputs(), gradients(), run);
}
void Case::both(const Run& run) const {
  forward(run);
  backward(run);
}

std::vector<const Array*> Case::every() const {
  return {&q,      &k,   &v,   &bias, &mask, &slopes, &sink, &begins_q, &begins_k, &used_q,
          &used_k, &out, &lse, &dout, &dlse, &dq,     &dk,   &dv,       &dbias,    &dsink};
}

std::string Case::result_bytes() const {
  std::string bytes;
  for (const Array* array : results()) bytes += array->bytes();
  return bytes;
}

double tolerance(Type type) {
  switch (type) {
    case Type::f64:
      return 1e-12;
    case Type::f32:
      return 4e-6;
    case Type::f16:
      return 4e-3;
    default:
      return 3e-2;
  }
}

std::string disagreement(const Settings& s, const Run& run) {
  const Case got(s), want(s, Case::Values::exact);
  got.both(run);
  want.both({.threads = 1, .backend = "reference"});
  std::ostringstream wrong;
  for (std::size_t n = 0; n < got.results().size(); ++n) {
    const Array& result = *got.results()[n];
    if (!result.given()) continue;
    const double error = row_error(result, *want.results()[n], natural_size(s, n));
    // A gradient is no better than the out that it is given.
    const double allowed = std::max(
        {tolerance(s.type), tolerance(got.out.tensor().type), tolerance(result.tensor().type)});
    if (!(error <= allowed)) {
      wrong << kResultNames[n] << " is off by " << error << " (" << to_string(s) << ")\n";
    }
  }
  for (const Array* array : got.every()) {
    if (array->given() && !array->gaps_intact()) {
      wrong << "something was written between elements (" << to_string(s) << ")\n";
    }
  }
  return wrong.str();
}

}  // namespace regard::tests
