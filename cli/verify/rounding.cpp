// First-order error analysis by the reference backend itself, called with sizes for inputs.
//
// A weight p_ij has the relative error r_i + e g A_ij with r_i = u + e (4 + g A_i): u is the unit
// roundoff of the inputs' type and e that of the arithmetic; A_ij is the size of what is summed
// into the score (|scale| |q_i| |k_j|, bias, ALiBi), and its mean over the row, A_i, is the error
// of the lse; g grows with the square root of the head size, as rounding errors of sums do. Scores
// that are larger by t A_ij have weights p_ij (1 + t A_ij): the difference of two calls gives the
// sums over p_ij A_ij. Gradients are linear in dout and dlse, so that the gradients of sizes are
// the sizes of gradients.
#include "verify/rounding.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "tensors/geometry.hpp"
#include "verify/float64.hpp"

namespace regard::cli {

namespace {

// Rows (a x + b |x|, a' x + b' |x|, ...).
struct Block {
  double of_value, of_size;

  double operator()(double x) const {
    const double value = of_value == 0 ? 0 : of_value * x;
    return std::isinf(x) || of_size == 0 ? value : value + of_size * std::fabs(x);
  }
};

Array blocks(const Tensor& t, Type type, std::initializer_list<Block> list) {
  if (!t.given()) return {};
  const Index dim = t.sizes[t.rank - 1], width = dim * static_cast<Index>(list.size());
  Sizes sizes(t.sizes.begin(), t.sizes.begin() + t.rank);
  sizes.back() = width;
  Array array(type, sizes);
  Index n = 0;
  for_each_offset(t, [&](Index offset) {
    Index to = n / dim * width + n % dim;
    for (const Block& block : list) {
      array.set(to, block(load(t.data, t.type, offset)));
      to += dim;
    }
    ++n;
  });
  return array;
}

// Adds factor |from - less| of one block of columns. Untouched elements stay -infinity.
void add_block(const Array& from, const Array& less, double factor, Index block, Array& to) {
  if (!to.given() || to.count() == 0) return;
  const Index dim = to.sizes.back(), width = from.sizes.back();
  for (Index n = 0; n < to.count(); ++n) {
    const Index at = n / dim * width + block * dim + n % dim;
    double& sum = to.as<double>()[n];
    if (from.get(at) == kUntouched) {
      sum = kUntouched;
    } else {
      sum += factor * std::fabs(from.get(at) - (less.given() ? less.get(at) : 0));
    }
  }
}

void add(const Results& from, const Results& less, double factor, Results& units) {
  add_block(from.dq, less.dq, factor, 1, units.dq);
  add_block(from.dk, less.dk, factor, 2, units.dk);
  add_block(from.dv, less.dv, factor, 0, units.dv);
  add_block(from.dbias, less.dbias, factor, 0, units.dbias);
  add_block(from.dsink, less.dsink, factor, 0, units.dsink);
}

class Units {
 public:
  Units(const Attention& a, const Tensor& dout, const Tensor& dlse, const WantedTypes& wanted,
        int threads)
      : a_(a),
        plain_(a),
        wanted_(wanted),
        threads_(threads),
        shape_(shape_of(a)),
        dout_(converted(dout, f64)),
        dlse_(converted(dlse, f64)),
        roundoff_(unit_roundoff(a.q.type)),
        arithmetic_(unit_roundoff(a.q.type == f64 ? f64 : f32)),
        growth_(arithmetic_ * std::max(1.0, std::sqrt(double(shape_.dim)) / 6)) {
    // Products of (q, t |q|, |q|) and (k, |k|, 0) are scores, larger by t A; in the gradients, the
    // second and third block hold sums of |k| and |q|.
    const double sign = scale_of(a, shape_) < 0 ? -1 : 1;
    plain_.scale = std::fabs(scale_of(a, shape_));
    q_ = blocks(a.q, f64, {{sign, 0}, {0, 0}, {0, 1}});
    k_ = blocks(a.k, f64, {{1, 0}, {0, 1}, {0, 0}});
    v_ = blocks(a.v, f64, {{0, 1}});
    plain_.q = q_.tensor();
    plain_.k = k_.tensor();
    plain_.v = v_.tensor();
    moved_ = plain_;
    larger_[0] = blocks(a.q, f64, {{sign, 0}, {0, kMove}, {0, 1}});
    larger_[1] = blocks(a.bias, f64, {{1, kMove}});
    larger_[2] = blocks(a.alibi_slopes, f32, {{1, -kMove}});
    larger_[3] = blocks(a.sink, f32, {{1, kMove}});
    moved_.q = larger_[0].tensor();
    moved_.bias = larger_[1].tensor();
    moved_.alibi_slopes = larger_[2].tensor();
    moved_.sink = larger_[3].tensor();
  }

  Results run() {
    const Results forward = reference(plain_, {}, {}, {.out = f64});
    const Results moved = reference(moved_, {}, {}, {.out = f64});
    Results units = empty_results(a_, wanted_);
    for (Index row = 0; row < rows(); ++row) {
      const double lse = forward.lse.get(lse_of(row));
      const double rise = std::isinf(lse) ? 0 : moved.lse.get(lse_of(row)) - lse;
      // tanh has an error relative to the capped score; in 16-bit kernels, to the cap.
      const double capped = size_of(a_.q.type) == 2 ? a_.softcap : std::fabs(lse);
      const double mean = rise / kMove + std::min(a_.softcap, capped);
      Row& r =
          rows_.emplace_back(Row{roundoff_ + 4 * arithmetic_ + growth_ * mean, std::exp(rise)});
      for (Index d = 0; d < shape_.dim_v; ++d) {
        const Index n = row * shape_.dim_v + d;
        const double out = forward.out.get(n);
        r.untouched = out == kUntouched;
        units.out.set(n, r.untouched
                             ? out
                             : r.error * out + growth_ / kMove * (r.rise * moved.out.get(n) - out));
      }
      units.lse.set(lse_of(row), r.untouched ? kUntouched
                                 : std::isinf(lse)
                                     ? 0  // sees nothing
                                     : arithmetic_ * (1 + std::fabs(lse)) + growth_ * mean);
    }
    if (wanted_.backward()) backward(forward, moved, units);
    // Weights may underflow, and what they are multiplied by is far smaller than this bound's
    // inverse.
    const double tiny = a_.q.type == f64 ? 0x1p-960 : 0x1p-100;
    for (Array* array : {&units.out, &units.dq, &units.dk, &units.dv, &units.dbias, &units.dsink}) {
      for (Index n = 0; n < array->count(); ++n) {
        if (array->get(n) > 0) array->as<double>()[n] += tiny;
      }
    }
    return units;
  }

 private:
  static constexpr double kMove = 0x1p-20;  // t: f32 holds numbers that differ so little

  struct Row {
    double error,
        rise;  // r_i; the factor from moved weights to theirs before the softmax's division
    bool untouched = false;
    double terms = 0;  // the mean of what its weights are multiplied by
  };

  Results reference(const Attention& a, const Tensor& dout, const Tensor& dlse,
                    const WantedTypes& wanted) const {
    return float64_reference(a, dout, dlse, wanted, threads_, kUntouched);
  }

  Index rows() const { return shape_.dim > 0 ? q_.count() / (3 * shape_.dim) : 0; }
  // lse of packed sequences has its heads first.
  Index lse_of(Index row) const {
    return shape_.packed ? row % shape_.heads_q * a_.q.sizes[0] + row / shape_.heads_q : row;
  }

  // What reaches the weights of each row.
  struct Cotangents {
    Array dout, dlse;

    Cotangents(const Array& dout, const Array& lse) : dout(f64, dout.sizes), dlse(f64, lse.sizes) {}
  };

  void backward(const Results& forward, const Results& moved, Results& units) {
    Cotangents error(dout_, forward.lse), size(dout_, forward.lse), moved_size(dout_, forward.lse);
    const double out_roundoff = std::max(roundoff_, unit_roundoff(wanted_.out));
    for (Index row = 0; row < rows(); ++row) {
      Row& r = rows_[static_cast<std::size_t>(row)];
      double delta = 0, moved_delta = 0, delta_error = 0;
      for (Index d = 0; d < shape_.dim_v; ++d) {
        const Index n = row * shape_.dim_v + d;
        const double part = std::fabs(dout_.get(n)), out = forward.out.get(n);
        error.dout.set(n, r.error * part);
        size.dout.set(n, part);
        moved_size.dout.set(n, r.rise * part);
        if (out == 0) continue;  // the row sees nothing, and dout may hold NaN
        delta += part * out;
        moved_delta += part * moved.out.get(n);
        delta_error += part * (units.out.get(n) + out_roundoff * out + smallest_step(wanted_.out));
      }
      // The backward pass subtracts delta. Its size must be added, so that dlse has it twice.
      const Index n = lse_of(row);
      const double direct = dlse_.given() ? std::fabs(dlse_.get(n)) : 0;
      r.terms = 2 * delta + direct;
      error.dlse.set(n, r.error * r.terms + delta_error);
      size.dlse.set(n, r.terms);
      moved_size.dlse.set(n, r.rise * (moved_delta + delta + direct));
    }
    const auto gradients = [&](const Attention& a, const Cotangents& c) {
      return reference(a, c.dout.tensor(), c.dlse.tensor(), wanted_);
    };
    add(gradients(plain_, error), {}, 1, units);
    add(gradients(moved_, moved_size), gradients(plain_, size), growth_ / kMove, units);
    if (a_.softcap > 0) add_slope_errors(units);
  }

  // The slope of a softcap, 1 - tanh^2, has an absolute error.
  void add_slope_errors(Results& units) {
    Attention a = plain_;
    const Array size_k = blocks(a_.k, f64, {{0, 1}}), dout = blocks(a_.q, f64, {{0, 1}});
    a.v = size_k.tensor();
    a.dropout = {};
    const auto factor = [&](Index n) {
      return 2 * arithmetic_ * *a.scale * rows_[static_cast<std::size_t>(n / shape_.dim)].terms;
    };
    for (Index n = 0; n < dout.count(); ++n) dout.as<double>()[n] *= factor(n);
    const Results got = reference(a, dout.tensor(), {}, {.out = f64, .dv = f64});
    for (Index n = 0; n < got.out.count(); ++n) {
      if (got.out.get(n) != kUntouched) got.out.as<double>()[n] *= factor(n);
    }
    add_block(got.out, {}, 1, 0, units.dq);
    add_block(got.dv, {}, 1, 0, units.dk);
  }

  const Attention& a_;
  Attention plain_, moved_;
  const WantedTypes wanted_;
  const int threads_;
  const Shape shape_;
  const Array dout_, dlse_;
  const double roundoff_, arithmetic_, growth_;  // u, e, e g
  Array q_, k_, v_, larger_[4];
  std::vector<Row> rows_;
};

}  // namespace

Results rounding_units(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                       const WantedTypes& wanted, int threads) {
  return Units(attention, dout, dlse, wanted, threads).run();
}

}  // namespace regard::cli
