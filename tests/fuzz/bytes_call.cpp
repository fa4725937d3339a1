// A call of the public API, made of bytes: sizes, strides, types and options, valid or not.
#include "tests/fuzz/bytes_call.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "regard/regard.hpp"

namespace regard::tests {
namespace {

constexpr std::int64_t kMaxBytes = 1 << 16;  // of one tensor
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
  void place(Tensor& t, bool filled);
  Tensor lengths(std::int64_t count, std::int64_t longest, bool sums);
  Tensor score_tensor(Type type);
  void read_sizes();
  Attention attention();
  Run read_run();

  Bytes in_;
  std::vector<std::unique_ptr<char[]>> memory_;
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

// Gives the tensor memory from its lowest to its highest element, or none where that is too much:
// then the pointer is null, or a page that is not there.
void Caller::place(Tensor& t, bool filled) {
  const auto size = std::int64_t(size_of(t.type));
  __int128 low = 0, high = size > 0 ? 1 : 0;
  for (int axis = 0; axis < t.rank && axis < Tensor::kMaxRank; ++axis) {
    if (t.sizes[axis] <= 0) {
      high = low = 0;
      break;
    }
    const __int128 reach = __int128(t.sizes[axis] - 1) * t.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  if ((high - low) * size > kMaxBytes || size == 0) {
    t.data = nullptr;
    return;
  }
  const auto bytes = std::int64_t(high - low) * size;
  auto memory = std::make_unique<char[]>(std::size_t(bytes));
  for (std::int64_t n = 0; n < bytes; ++n) {
    // Small numbers of every type, seldom a NaN or an infinity.
    const std::int64_t mixed = n / size * 0x9e3779b9 >> 8;
    const int byte = n % size == size - 1 ? 0x3c + mixed % 3 : mixed % 128;
    memory[n] = filled ? char(byte | (mixed % 5 == 0 && n % size == size - 1 ? 0x80 : 0)) : 0;
  }
  if (filled && bytes > 8 && in_.rarely()) std::memset(memory.get(), 0xff, 8);
  t.data = memory.get() - std::int64_t(low) * size;
  memory_.push_back(std::move(memory));
}

Tensor Caller::tensor(Type type, std::initializer_list<std::int64_t> sizes, bool filled) {
  Tensor t(nullptr, type, sizes);
  const std::uint8_t how = in_.next();
  if (how % 8 == 1 && t.rank == 4) {  // (batch, length, heads, size) in memory
    std::swap(t.strides[1], t.strides[2]);
    t.strides[1] = t.sizes[3];
    t.strides[2] = t.sizes[3] * t.sizes[1];
  }
  if (how % 8 == 2) {
    for (int axis = 0; axis + 1 < t.rank; ++axis) t.strides[axis] *= 2;
  }
  if (how % 8 == 3 && filled && t.rank > 1) t.strides[0] = 0;
  if (how >= 240) spoil(t);
  place(t, filled);
  if (how == 239) t.data = nullptr;
  return t;
}

Tensor Caller::lengths(std::int64_t count, std::int64_t longest, bool sums) {
  Tensor t = tensor(i32, {count + (sums ? 1 : 0)});
  const bool wild = in_.rarely();
  std::int32_t at = 0;
  for (std::int64_t n = 0; t.data && t.type == i32 && t.rank == 1 && n < t.sizes[0]; ++n) {
    const auto length = std::int32_t(wild ? odd() : in_.below(int(longest) + 1));
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

void Caller::run() {
  read_sizes();
  const Attention a = attention();
  Run run = read_run();
  const Type wide = in_.below(4) == 0 ? f32 : type_;
  const Type sums = type_ == f64 ? f64 : f32;
  const bool lse_wanted = in_.below(4) != 0;
  const auto rows = [&](std::int64_t heads, std::int64_t length, std::int64_t dim, bool filled) {
    return packed_ ? tensor(wide, {batch_ * length, heads, dim}, filled)
                   : tensor(wide, {batch_, heads, length, dim}, filled);
  };
  const auto lse_like = [&](bool filled) {
    return packed_ ? tensor(sums, {heads_, batch_ * len_q_}, filled)
                   : tensor(sums, {batch_, heads_, len_q_}, filled);
  };
  const std::int64_t heads_kv = heads_ / group_;
  const Tensor out = rows(heads_, len_q_, dim_v_, false), lse = lse_like(false);
  std::unique_ptr<char[]> workspace_memory;
  const auto give_workspace = [&](Pass pass) {
    if (in_.below(4) != 0) return;
    const std::size_t size = workspace(a, pass, run);
    if (size > (1 << 26)) return;
    workspace_memory = std::make_unique<char[]>(size);
    run.workspace = {workspace_memory.get(), size - (in_.rarely() && size > 0 ? 1 : 0)};
  };
  (void)explain(a, Pass::backward, {.backend = run.backend});
  give_workspace(Pass::forward);
  forward(a, {.out = out, .lse = lse_wanted ? lse : Tensor()}, run);
  const std::uint8_t wanted = in_.next();
  const auto if_wanted = [&](int bit, const Tensor& t) { return wanted >> bit & 1 ? t : Tensor(); };
  Gradients g{.dq = if_wanted(0, rows(heads_, len_q_, dim_, false)),
              .dk = if_wanted(1, rows(heads_kv, len_k_, dim_, false)),
              .dv = if_wanted(2, rows(heads_kv, len_k_, dim_v_, false))};
  if (a.bias.given() && (wanted & 8) && a.bias.rank == 4) {
    g.dbias = tensor(wanted & 16 ? f32 : a.bias.type,
                     {a.bias.sizes[0], a.bias.sizes[1], a.bias.sizes[2], a.bias.sizes[3]}, false);
  }
  if (a.sink.given() && (wanted & 32)) g.dsink = tensor(f32, {heads_}, false);
  g.accumulate = (wanted & 64) != 0;
  run.workspace = {};
  give_workspace(Pass::backward);
  backward(a,
           {.out = out,
            .lse = lse,
            .dout = rows(heads_, len_q_, dim_v_, true),
            .dlse = if_wanted(7, lse_like(true))},
           g, run);
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
