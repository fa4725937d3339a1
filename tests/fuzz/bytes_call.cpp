// A call of the public API, made of bytes: sizes, strides, types and options, valid or not.
#include "tests/fuzz/bytes_call.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

#include "regard/regard.hpp"
#include "tests/fuzz/placed.hpp"

namespace regard::tests {
namespace {

constexpr std::int64_t kLongest = 1 << 16;  // a longer axis has all its elements in one place
constexpr double kMostCompared = 1 << 20;   // elements of an output, repeated ones too
constexpr std::int64_t kPairWork = 64;      // of a pair's weight, in multiplications
constexpr std::int64_t kGiants[] = {1 << 17, 1 << 20, (1 << 24) + 1, 1 << 30, 0x7fffffff};
constexpr std::int64_t kOdd[] = {0,
                                 1,
                                 -1,
                                 1 << 20,
                                 std::int64_t(1) << 31,
                                 (std::int64_t(1) << 31) - 1,
                                 std::int64_t(1) << 40,
                                 std::numeric_limits<std::int64_t>::max(),
                                 std::numeric_limits<std::int64_t>::min(),
                                 -2};
constexpr double kOddNumbers[] = {0,
                                  1,
                                  -1,
                                  0.5,
                                  1e-300,
                                  1e300,
                                  1e39,
                                  -0.0,
                                  std::numeric_limits<double>::quiet_NaN(),
                                  std::numeric_limits<double>::infinity()};

class Caller {
 public:
  explicit Caller(Bytes bytes) : in_(bytes) {}

  void run();

 private:
  std::int64_t odd() { return kOdd[in_.below(10)]; }
  double number() { return in_.rarely() ? kOddNumbers[in_.below(10)] : in_.next() / 64.0; }

  // A tensor of the sizes, sometimes spoiled. Its memory spans exactly what its strides reach.
  Tensor tensor(Type type, std::initializer_list<std::int64_t> sizes, bool filled = true);
  void spoil(Tensor& t);
  Tensor output(Type type, std::initializer_list<std::int64_t> sizes);
  Tensor rows(Type type, std::int64_t heads, std::int64_t length, std::int64_t dim);
  Tensor filled_like(Tensor t);
  Tensor lengths(std::int64_t count, std::int64_t longest, bool sums);
  Tensor score_tensor(Type type);
  Tensor spans(std::int64_t length);
  void give_positions(Attention&);
  void read_sizes();
  Attention attention();
  Run read_run();
  Gradients gradients(const Attention&, Type wide);
  bool is_small(const Attention&, Pass, const Run&);
  void give_workspace(Run&, const Attention&, Pass);
  template <class Outputs, class Call, class All>
  void call_and_compare(const Outputs&, Call, All);

  Bytes in_;
  Placed placed_;
  std::unique_ptr<char[]> workspace_;
  bool shares_ = false;  // some output lies in another tensor's memory
  Type type_ = f32;
  bool packed_ = false;
  std::int64_t batch_ = 0, heads_ = 0, group_ = 0, len_q_ = 0, len_k_ = 0, dim_ = 0, dim_v_ = 0;
};

void Caller::spoil(Tensor& t) {
  const int axis = int(in_.below(4));
  switch (in_.below(6)) {
    case 0:
      t.sizes[axis] = odd();
      break;
    case 1:
      t.strides[axis] = odd();
      break;
    case 2:
      t.rank = int(in_.below(8)) - 1;
      break;
    case 3:
      t.type = Type(in_.below(9));
      break;
    case 4:
      t.sizes[axis] += in_.below(3) - 1;
      break;
    default:
      t.strides[axis] += in_.below(5) - 2;
      break;
  }
}

Tensor Caller::tensor(Type type, std::initializer_list<std::int64_t> sizes, bool filled) {
  Tensor t(nullptr, type, sizes);
  std::int64_t dense = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    const bool giant = t.sizes[axis] > kLongest;
    t.strides[axis] = giant ? 0 : dense;
    if (!giant) dense *= std::max<std::int64_t>(1, t.sizes[axis]);
  }
  const std::uint8_t how = in_.next();
  if (how % 8 == 1 && t.rank == 4) {  // (batch, length, heads, size) in memory
    std::swap(t.strides[1], t.strides[2]);
    t.strides[1] = t.sizes[1] > kLongest ? 0 : t.sizes[3];
    t.strides[2] = t.sizes[2] > kLongest ? 0 : t.sizes[3] * std::min(t.sizes[1], kLongest);
  }
  if (how % 8 == 2) {
    for (int axis = 0; axis + 1 < t.rank; ++axis) t.strides[axis] *= 2;
  }
  if (how % 8 == 3 && filled && t.rank > 1) t.strides[0] = 0;
  if (how >= 240) spoil(t);
  placed_.place(t, in_, filled);
  if (how == 239) t.data = nullptr;
  return t;
}

Tensor Caller::filled_like(Tensor t) {
  placed_.place(t, in_, true);
  return t;
}

Tensor Caller::lengths(std::int64_t count, std::int64_t longest, bool sums) {
  Tensor t = tensor(i32, {count + (sums ? 1 : 0)});
  const bool wild = in_.rarely();
  std::int32_t at = 0;
  for (std::int64_t n = 0;
       t.data && t.type == i32 && t.rank == 1 && n < std::min(t.sizes[0], kLongest); ++n) {
    const auto length =
        std::int32_t(wild ? odd() : in_.below(int(std::min<std::int64_t>(longest, 255)) + 1));
    const std::int32_t value = sums ? at : length;
    static_cast<std::int32_t*>(t.data)[n * t.strides[0]] = wild ? length : value;
    at += wild ? 0 : length;
  }
  return t;
}

Tensor Caller::score_tensor(Type type) {
  const std::uint8_t which = in_.next();
  const auto size = [&](int axis, std::int64_t full) { return which >> axis & 1 ? full : 1; };
  return tensor(type, {size(0, batch_), size(1, heads_), size(2, len_q_), size(3, len_k_)});
}

// For the rows of q or of k.
Tensor Caller::spans(std::int64_t length) {
  const std::int64_t ends = in_.rarely() ? in_.below(20) : 2 * (1 + in_.below(4));
  const std::int64_t batch = in_.below(2) ? batch_ : 1, heads = in_.below(2) ? heads_ : 1;
  return packed_ ? tensor(i32, {heads, batch_ * length, ends})
                 : tensor(i32, {batch, heads, length, ends});
}

// Mostly valid ones: blocks of 128 rows, some with rows left out between them.
void Caller::give_positions(Attention& a) {
  const std::int64_t blocks = (std::min(len_q_, kLongest) + 127) / 128;
  Tensor& t = a.q_positions;
  t = in_.below(2) ? tensor(i32, {blocks}) : tensor(i32, {batch_, blocks});
  const bool is_written = t.data && t.type == i32 && (t.rank == 1 || t.rank == 2);
  const std::int64_t entries = t.rank == 2 ? std::min(t.sizes[0], kLongest) : 1;
  for (std::int64_t b = 0; is_written && b < entries; ++b) {
    std::int64_t at = in_.below(200);
    for (std::int64_t n = 0; n < std::min(t.sizes[t.rank - 1], kLongest); ++n) {
      const std::int64_t offset = (t.rank == 2 ? b * t.strides[0] : 0) + n * t.strides[t.rank - 1];
      static_cast<std::int32_t*>(t.data)[offset] = std::int32_t(in_.rarely() ? odd() : at);
      at += 128 + in_.below(2) * 100;
    }
  }
  a.k_position = in_.rarely() ? odd() : 32 * in_.below(8);
  a.batch_begin = in_.rarely() ? odd() : in_.below(3);
  a.head_begin = in_.rarely() ? odd() : in_.below(3);
}

void Caller::read_sizes() {
  type_ = Type(1 + in_.below(4));
  packed_ = in_.below(4) == 0;
  batch_ = in_.below(4);
  group_ = 1 + in_.below(3);
  heads_ = group_ * (1 + in_.below(2));
  len_q_ = in_.below(8) == 0 ? in_.below(150) : in_.below(20);
  len_k_ = in_.below(8) == 0 ? in_.below(250) : in_.below(40);
  dim_ = 1 + in_.below(36);
  dim_v_ = 1 + in_.below(36);
  const std::int64_t kind = in_.below(16);
  if (kind == 1) {  // keys that are split
    len_k_ = 8000 + in_.below(256) * 20;
    dim_ = 1 + dim_ % 4;
    dim_v_ = 1 + dim_v_ % 4;
  } else if (kind == 2) {
    len_k_ = kGiants[in_.below(5)];
  } else if (kind == 3) {
    std::int64_t* const sizes[] = {&batch_, &len_q_, &len_k_};
    *sizes[in_.below(3)] = kGiants[in_.below(5)];
    heads_ *= in_.below(2) ? 1 : kGiants[in_.below(4)];
  }
}

Attention Caller::attention() {
  Attention a;
  if (packed_) {
    a.cu_seqlens_q = lengths(batch_, len_q_, true);
    a.cu_seqlens_k = lengths(batch_, len_k_, true);
    a.max_seqlen_q = in_.rarely() ? odd() : len_q_;
    a.max_seqlen_k = in_.rarely() ? odd() : len_k_;
    const std::int64_t rows_q = batch_ * len_q_, rows_k = batch_ * len_k_;
    a.q = tensor(type_, {rows_q, heads_, dim_});
    a.k = tensor(type_, {rows_k, heads_ / group_, dim_});
    a.v = tensor(type_, {rows_k, heads_ / group_, dim_v_});
  } else {
    a.q = tensor(type_, {batch_, heads_, len_q_, dim_});
    a.k = tensor(type_, {batch_, heads_ / group_, len_k_, dim_});
    a.v = tensor(type_, {batch_, heads_ / group_, len_k_, dim_v_});
  }
  const std::uint8_t features = in_.next();
  if (features & 1) a.bias = score_tensor(Type(1 + in_.below(4)));
  if (features & 2) a.mask = score_tensor(boolean);
  if (features & 4) a.alibi_slopes = tensor(f32, {heads_});
  if (features & 8) a.sink = tensor(f32, {heads_});
  if (features & 16) a.seqused_q = lengths(batch_, packed_ ? 0 : len_q_, false);
  if (features & 16) a.seqused_k = lengths(batch_, packed_ ? 0 : len_k_, false);
  if (features & 32) a.scale = number();
  if (features & 64) a.softcap = number();
  if (features & 128) a.dropout = {.p = number() / 4, .seed = in_.next(), .offset = in_.next()};
  a.causal = Causal(in_.rarely() ? in_.next() : in_.below(3));
  if (in_.below(3) == 0) {
    a.window.left = in_.rarely() ? odd() : in_.below(60) - 1;
    a.window.right = in_.rarely() ? odd() : in_.below(60) - 1;
  }
  if (in_.rarely()) a.precision = Precision(in_.below(5));
  if (in_.rarely()) a.continue_from = in_.below(2) == 0;
  if (in_.below(4) == 0) a.row_spans = spans(len_q_);
  if (in_.below(4) == 0) a.key_spans = spans(len_k_);
  if (in_.below(4) == 0) give_positions(a);
  return a;
}

Run Caller::read_run() {
  const char* const names[] = {"",          "cpu:scalar",     "cpu:avx2", "cpu:avx512",
                               "reference", "cpu:avx512bf16", "cpu",      "nonsense"};
  Run run;
  run.backend = names[in_.below(8)];
  run.threads = in_.rarely() ? -1 : 1 + int(in_.below(3));
  return run;
}

Tensor Caller::output(Type type, std::initializer_list<std::int64_t> sizes) {
  Tensor t = tensor(type, sizes, false);
  if (in_.next() % 16 == 13) shares_ = placed_.share(t, in_) || shares_;
  return t;
}

Tensor Caller::rows(Type type, std::int64_t heads, std::int64_t length, std::int64_t dim) {
  return packed_ ? output(type, {batch_ * length, heads, dim})
                 : output(type, {batch_, heads, length, dim});
}

// Plans of every size must be made, or refused; only calls of little work are then run.
bool Caller::is_small(const Attention& a, Pass pass, const Run& run) {
  for (const char* chip_name : {"sm_75", "sm_80", "sm_90"}) {
    try {
      if (type_ != f64) (void)workspace(a, pass, {.device = chip(chip_name)});
    } catch (const Error& error) {
      if (error.code() != Code::unsupported && error.code() != Code::unavailable) throw;
    }
  }
  const Explanation e = explain(a, pass, run);
  const bool by_reference = run.backend == "reference";
  const double keys = double(batch_) * double(heads_) * double(len_k_);
  // Blocks of queries are visited even where they see nothing.
  const double blocks = double(batch_) * double(heads_) * double(len_q_ / 64 + 1);
  const double work = e.pairs * double(dim_ + dim_v_ + kPairWork);
  return work < (by_reference ? 1e7 : 3e7) && e.workspace < (1 << 26) &&
         (blocks * double(dim_) < 3e5 || pass == Pass::forward) &&
         (packed_ || keys < 1e6 || (pass == Pass::forward && !by_reference));
}

void Caller::give_workspace(Run& run, const Attention& a, Pass pass) {
  run.workspace = {};
  if (in_.below(4) != 0) return;
  const std::size_t size = workspace(a, pass, run);
  workspace_ = std::make_unique<char[]>(size);
  run.workspace = {workspace_.get(), size - (in_.rarely() && size > 0 ? 1 : 0)};
}

// Where outputs share the memory of other tensors, the call is refused, or gives what it gives
// where none does. `call` takes outputs; `all` lists their tensors.
template <class Outputs, class Call, class All>
void Caller::call_and_compare(const Outputs& to, Call call, All all) {
  std::string wanted;
  Outputs given = to;
  bool compares = shares_;
  for (const Tensor* t : all(given)) compares = compares && count_of(*t) < kMostCompared;
  if (compares) {
    Outputs apart = to;
    for (Tensor* t : all(apart)) *t = placed_.apart(*t);
    call(apart);
    for (Tensor* t : all(apart)) wanted += elements_of(*t);
  }
  call(to);
  if (!compares) return;
  std::string got;
  for (Tensor* t : all(given)) got += elements_of(*t);
  if (got == wanted) return;
  std::fprintf(stderr, "outputs in shared memory are wrong\n");
  std::abort();
}

Gradients Caller::gradients(const Attention& a, Type wide) {
  const std::uint8_t wanted = in_.next();
  const std::int64_t heads_kv = heads_ / group_;
  Gradients g;
  if (wanted & 1) g.dq = rows(wide, heads_, len_q_, dim_);
  if (wanted & 2) g.dk = rows(wide, heads_kv, len_k_, dim_);
  if (wanted & 4) g.dv = rows(wide, heads_kv, len_k_, dim_v_);
  if (a.bias.given() && (wanted & 8) && a.bias.rank == 4) {
    g.dbias = output(wanted & 16 ? f32 : a.bias.type,
                     {a.bias.sizes[0], a.bias.sizes[1], a.bias.sizes[2], a.bias.sizes[3]});
  }
  if (a.sink.given() && (wanted & 32)) g.dsink = output(f32, {heads_});
  g.accumulate = (wanted & 64) != 0;
  return g;
}

void Caller::run() {
  read_sizes();
  const Attention a = attention();
  Run run = read_run();
  const Type wide = in_.below(4) == 0 ? f32 : type_;
  const Type sums = type_ == f64 ? f64 : f32;
  const bool lse_wanted = in_.below(4) != 0;
  const auto lse_like = [&] {
    return packed_ ? output(sums, {heads_, batch_ * len_q_})
                   : output(sums, {batch_, heads_, len_q_});
  };
  const ForwardOutputs to{.out = rows(wide, heads_, len_q_, dim_v_), .lse = lse_like()};
  if (!is_small(a, Pass::forward, run)) return;
  give_workspace(run, a, Pass::forward);
  const auto outputs = [](ForwardOutputs& x) { return std::array{&x.out, &x.lse}; };
  call_and_compare(
      ForwardOutputs{.out = to.out, .lse = lse_wanted ? to.lse : Tensor()},
      [&](const ForwardOutputs& x) { forward(a, x, run); }, outputs);
  const bool has_delta = in_.below(8) == 0;
  const BackwardInputs from{
      .out = has_delta ? Tensor() : to.out,
      .lse = to.lse,
      .dout = filled_like(to.out),
      .dlse = !has_delta && in_.below(4) == 0 ? filled_like(to.lse) : Tensor(),
      .delta = has_delta ? filled_like(to.lse) : Tensor()};
  shares_ = false;
  const Gradients g = gradients(a, wide);
  if (!is_small(a, Pass::backward, run)) return;
  give_workspace(run, a, Pass::backward);
  const auto each = [](Gradients& x) {
    return std::array{&x.dq, &x.dk, &x.dv, &x.dbias, &x.dsink};
  };
  call_and_compare(
      g, [&](const Gradients& x) { backward(a, from, x, run); }, each);
}

}  // namespace

void call_of(Bytes bytes) {
  try {
    Caller(bytes).run();
  } catch (const Error& error) {
    const std::string text = error.what();
    if (error.argument().empty() || text.find(error.argument() + " = ") != 0) {
      std::fprintf(stderr, "an Error without an argument: %s\n", text.c_str());
      std::abort();
    }
    if (error.code() == Code::internal) std::abort();
  }
}

}  // namespace regard::tests
