// Random contents, the two passes, and their checks against float64.
#include "bench_problem.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "command_line/parse.hpp"
#include "tensors/random.hpp"
#include "verify/comparison.hpp"
#include "verify/float64.hpp"
#include "verify/rounding.hpp"

namespace regard::cli {

namespace {

constexpr Index kCheckedRows = 16;

Sizes sizes_of(const Tensor& t) { return {t.sizes.begin(), t.sizes.begin() + t.rank}; }

// Normals from a table: drawing each element anew would take longer than the attention.
class Normals {
 public:
  Normals() : values_(kPeriod) {
    Random random(1, 1);
    for (float& x : values_) x = static_cast<float>(random.normal());
  }

  void begin_at(std::size_t at) { at_ = at; }

  // value_of: of a normal. One period is made element by element; the rest is copied from it.
  template <class ValueOf>
  Array filled(const Tensor& like, ValueOf&& value_of) {
    if (!like.given()) return {};
    Array array(like.type, sizes_of(like));
    const auto count = static_cast<std::size_t>(array.count());
    for (std::size_t n = 0; n < std::min(count, kPeriod); ++n) {
      array.set(static_cast<Index>(n), value_of(values_[(at_ + 1 + n) % kPeriod]));
    }
    at_ = (at_ + count) % kPeriod;
    auto* const bytes = static_cast<std::byte*>(array.data());
    for (std::size_t done = kPeriod * size_of(like.type); done < array.byte_count();) {
      const std::size_t more = std::min(done, array.byte_count() - done);
      std::memcpy(bytes + done, bytes, more);
      done += more;
    }
    return array;
  }

  Array filled(const Tensor& like) {
    return filled(like, [](float x) { return x; });
  }

 private:
  static constexpr std::size_t kPeriod = 65521;
  std::vector<float> values_;
  std::size_t at_ = 0;
};

Array zeros(Type type, const Tensor& like) {
  return like.given() ? Array(type, sizes_of(like)) : Array{};
}

// The part of a (b, h, row, ...) tensor that belongs to the last head's last rows.
Tensor last_rows(Tensor t, Index rows) {
  auto* data = static_cast<std::byte*>(t.data);
  for (int axis = 0; axis < 3; ++axis) {
    const Index keep = axis < 2 ? 1 : rows;
    if (t.sizes[axis] <= keep) continue;
    data += (t.sizes[axis] - keep) * t.strides[axis] * static_cast<Index>(size_of(t.type));
    t.sizes[axis] = keep;
  }
  t.data = data;
  return t;
}

std::string judge(const char* name, const Tensor& got, const Reference& reference,
                  const Tolerance& tolerance) {
  const Comparison c = compare(got, reference, tolerance, nullptr);
  return c.failed() ? fmt::format("{}{}", name, c.complaint) : std::string();
}

constexpr Tolerance kOut{.factor = 2, .slack = 4}, kLse{.factor = 2, .slack = 8};
constexpr Tolerance kGradient{.factor = 3, .slack = 6};

}  // namespace

BenchProblem::BenchProblem(const Attention& described, bool backward, const Device& device)
    : attention_(described), backward_(backward), mirror_(device) {
  Normals normals;
  q_ = normals.filled(described.q);
  normals.begin_at(12345);
  k_ = normals.filled(described.k);
  normals.begin_at(33333);
  v_ = normals.filled(described.v);
  bias_ = normals.filled(described.bias);
  mask_ = normals.filled(described.mask, [](float x) { return x > -1; });
  alibi_slopes_ = normals.filled(described.alibi_slopes, [](float) { return 0.01; });
  sink_ = normals.filled(described.sink);
  attention_.q = q_.tensor();
  attention_.k = k_.tensor();
  attention_.v = v_.tensor();
  attention_.bias = bias_.tensor();
  attention_.mask = mask_.tensor();
  attention_.alibi_slopes = alibi_slopes_.tensor();
  attention_.sink = sink_.tensor();
  Tensor out = described.q;
  out.sizes[3] = described.v.sizes[3];
  out_ = zeros(out.type, out);
  lse_ = Array(out.type == f64 ? f64 : f32, {out.sizes[0], out.sizes[1], out.sizes[2]});
  if (backward) {
    normals.begin_at(54321);
    dout_ = normals.filled(out);
    dq_ = zeros(out.type, described.q);
    dk_ = zeros(out.type, described.k);
    dv_ = zeros(out.type, described.v);
    dbias_ = zeros(described.bias.type, described.bias);
    dsink_ = zeros(f32, described.sink);
  }
  for (const Array* array : {&q_, &k_, &v_, &bias_, &mask_, &alibi_slopes_, &sink_, &out_, &lse_,
                             &dout_, &dq_, &dk_, &dv_, &dbias_, &dsink_}) {
    mirror_.add(array->data(), array->byte_count());
  }
  mirror_.upload();
}

void BenchProblem::run_forward(const Run& run) const {
  forward(mirror_.at(attention_),
          mirror_.at(ForwardOutputs{.out = out_.tensor(), .lse = lse_.tensor()}), run);
}

void BenchProblem::run_backward(const Run& run) const {
  backward(mirror_.at(attention_),
           mirror_.at(BackwardInputs{
               .out = out_.tensor(), .lse = lse_.tensor(), .dout = dout_.tensor(), .dlse = {}}),
           mirror_.at(Gradients{.dq = dq_.tensor(),
                                .dk = dk_.tensor(),
                                .dv = dv_.tensor(),
                                .dbias = dbias_.tensor(),
                                .dsink = dsink_.tensor()}),
           run);
}

WantedTypes BenchProblem::wanted() const {
  WantedTypes types;
  types.out = attention_.q.type;
  if (!backward_) return types;
  types.dq = types.dk = types.dv = attention_.q.type;
  types.dbias = dbias_.type;
  types.dsink = dsink_.type;
  return types;
}

std::string BenchProblem::check_all() const {
  const Tensor dout = dout_.tensor();
  const WantedTypes types = wanted();
  const Results want = float64_reference(attention_, dout, {}, types, 0);
  UnfusedOptions options;
  options.wanted = types;
  const Results unfused = unfused_attention(attention_, dout, {}, options);
  const Results unit = rounding_units(attention_, dout, {}, types);
  const Index dim = attention_.q.sizes[3], dim_v = attention_.v.sizes[3];
  const std::string found[] = {
      judge("out", out_.tensor(), {want.out, unfused.out, unit.out, dim_v}, kOut),
      judge("lse", lse_.tensor(), {want.lse, unfused.lse, unit.lse, 1}, kLse),
      judge("dq", dq_.tensor(), {want.dq, unfused.dq, unit.dq, dim}, kGradient),
      judge("dk", dk_.tensor(), {want.dk, unfused.dk, unit.dk, dim}, kGradient),
      judge("dv", dv_.tensor(), {want.dv, unfused.dv, unit.dv, dim_v}, kGradient),
      judge("dbias", dbias_.tensor(), {want.dbias, unfused.dbias, unit.dbias, 1}, kGradient),
      judge("dsink", dsink_.tensor(), {want.dsink, unfused.dsink, unit.dsink, 1}, kGradient),
  };
  for (const std::string& complaint : found) {
    if (!complaint.empty()) return complaint;
  }
  return {};
}

// The last rows as a problem of their own see the same keys when the diagonal ends bottom right.
bool BenchProblem::can_check_last_rows() const {
  const Attention& a = attention_;
  return a.causal != Causal::top_left && !(a.dropout.p > 0) && !a.bias.given() && !a.mask.given() &&
         a.q.sizes[0] > 0 && a.q.sizes[2] > 0;
}

std::string BenchProblem::check_last_rows() const {
  Attention part = attention_;
  const Index rows = std::min(kCheckedRows, part.q.sizes[2]);
  part.q = last_rows(part.q, rows);
  part.k = last_rows(part.k, part.k.sizes[2]);
  part.v = last_rows(part.v, part.v.sizes[2]);
  for (Tensor* per_head : {&part.alibi_slopes, &part.sink}) {
    if (!per_head->given()) continue;
    per_head->data = static_cast<float*>(per_head->data) + per_head->sizes[0] - 1;
    per_head->sizes[0] = 1;
  }
  WantedTypes types;
  types.out = part.q.type;
  Tensor dout;
  if (backward_) {
    types.dq = part.q.type;
    dout = last_rows(dout_.tensor(), rows);
  }
  const Results want = float64_reference(part, dout, {}, types, 0);
  UnfusedOptions options;
  options.wanted = types;
  const Results unfused = unfused_attention(part, dout, {}, options);
  const Results unit = rounding_units(part, dout, {}, types);
  Tensor lse = lse_.tensor();
  lse.rank = 4;  // so that last_rows() sees (b, h, row, 1)
  lse.sizes[3] = lse.strides[3] = 1;
  lse = last_rows(lse, rows);
  lse.rank = 3;
  const std::string found[] = {
      judge("out", last_rows(out_.tensor(), rows),
            {want.out, unfused.out, unit.out, part.v.sizes[3]}, kOut),
      judge("lse", lse, {want.lse, unfused.lse, unit.lse, 1}, kLse),
      backward_ ? judge("dq", last_rows(dq_.tensor(), rows),
                        {want.dq, unfused.dq, unit.dq, part.q.sizes[3]}, kGradient)
                : std::string(),
  };
  for (const std::string& complaint : found) {
    if (!complaint.empty()) return complaint + " (the last rows of the last head)";
  }
  return {};
}

double bytes_needed(const Attention& a, bool backward) {
  const auto bytes = [](const Tensor& t) {
    double product = t.given() ? double(size_of(t.type)) : 0;
    for (int axis = 0; axis < t.rank; ++axis) product *= double(t.sizes[axis]);
    return product;
  };
  const double out = bytes(a.q) / double(std::max<Index>(1, a.q.sizes[3])) * double(a.v.sizes[3]);
  const double inputs = bytes(a.q) + bytes(a.k) + bytes(a.v) + bytes(a.bias);
  return bytes(a.mask) + inputs + out + (backward ? inputs + out : 0);
}

Attention shortened(const Attention& described) {
  const Shape shape = shape_of(described);
  constexpr Index kLength = 192;
  const Index batch = std::min<Index>(shape.batch, 1),
              heads_kv = std::min<Index>(shape.heads_kv, 2);
  // Both lengths shrink alike, so that the diagonal keeps its place.
  const Index longest = std::max(shape.len_q, shape.len_k);
  const auto shrink = [&](Index length) {
    return longest <= kLength ? length : std::max<Index>(length > 0, length * kLength / longest);
  };
  const Index heads_q = heads_kv * shape.group();
  const Index len_q = shrink(shape.len_q), len_k = shrink(shape.len_k);
  Attention a = described;
  a.q = shape_only(a.q.type, {batch, heads_q, len_q, shape.dim});
  a.k = shape_only(a.k.type, {batch, heads_kv, len_k, shape.dim});
  a.v = shape_only(a.v.type, {batch, heads_kv, len_k, shape.dim_v});
  const Sizes full{batch, heads_q, len_q, len_k};
  for (Tensor* pairs : {&a.bias, &a.mask}) {
    if (!pairs->given()) continue;
    Sizes sizes = sizes_of(*pairs);
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
      if (sizes[axis] != 1) sizes[axis] = full[4 - sizes.size() + axis];
    }
    *pairs = shape_only(pairs->type, sizes);
  }
  for (Tensor* per_head : {&a.alibi_slopes, &a.sink}) {
    if (per_head->given()) *per_head = shape_only(f32, {heads_q});
  }
  return a;
}

}  // namespace regard::cli
