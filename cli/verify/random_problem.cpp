// Draws sizes, features, layouts and values so that every combination of features comes up.
#include "verify/random_problem.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "verify/hidden.hpp"

namespace regard::cli {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Family { normal, outliers, large_logits, offset, integers };

class Builder {
 public:
  Builder(std::uint64_t seed, std::uint64_t index, const ProblemLimits& limits)
      : random_(seed, index), limits_(limits) {}

  RandomProblem build() {
    draw_sizes();
    draw_operands();
    draw_score_features();
    draw_visibility();
    if (random_.chance(0.12)) draw_positions();
    draw_outputs();
    if (random_.chance(0.04) && p_.attention.q.sizes[0] > 0 && shape_.len_q > 0) {
      store(q_->tensor.data, type_, 0, std::numeric_limits<double>::quiet_NaN());
      say(" NaN-in-first-query");
    }
    if (random_.chance(0.5)) {
      poison_hidden(random_, p_, {.q = q_, .k = k_, .v = v_, .bias = bias_});
      say(" poisoned");
    }
    p_.threads = static_cast<int>(random_.between(0, 4));
    return std::move(p_);
  }

 private:
  Slab* add(std::string name, Type type, const Sizes& sizes, SlabLayout layout) {
    p_.slabs.emplace_back(random_, std::move(name), type, sizes, layout);
    return &p_.slabs.back();
  }
  void say(const std::string& text) { p_.description += text; }

  Index draw_length() {
    const double kind = random_.uniform();
    const Index longest = limits_.max_len;
    if (kind < 0.02) return 0;
    if (kind < 0.30) return random_.between(1, std::min<Index>(8, longest));
    if (kind < 0.70) return random_.between(1, std::min<Index>(80, longest));
    if (kind < 0.93) return random_.between(1, std::min<Index>(600, longest));
    return random_.between(1, longest);
  }

  Index draw_dim() {
    const double kind = random_.uniform();
    if (kind < 0.25) return random_.between(1, 16);
    if (kind < 0.50) return random_.between(1, 64);
    if (kind < 0.80) return random_.pick<Index>({16, 32, 64, 80, 96, 128, 160, 256});
    return random_.between(1, 300);
  }

  void draw_sizes() {
    type_ = random_.pick({f64, f32, f32, f16, bf16});
    if (limits_.type != Type::none) type_ = limits_.type;
    shape_.batch = random_.chance(0.02) ? 0 : random_.between(1, 3);
    shape_.heads_kv = random_.between(1, 3);
    Index ratio = random_.pick<Index>({1, 1, 2, 3, 7});
    shape_.len_q = draw_length();
    shape_.len_k = random_.chance(0.3) ? shape_.len_q : draw_length();
    shape_.dim = draw_dim();
    shape_.dim_v = random_.chance(0.5) ? shape_.dim : draw_dim();
    shape_.packed = random_.chance(0.15);
    for_tma_ = size_of(type_) == 2 && random_.chance(0.5);
    // The float64 comparison costs about 30 operations a pair and head dimension.
    const double kind = random_.uniform();
    const double budget = kind < 0.77 ? 5e5 : kind < 0.97 ? 4e6 : 2.5e7;
    for (;;) {
      shape_.heads_q = shape_.heads_kv * ratio;
      if (shape_.pairs() * double(shape_.dim + shape_.dim_v) <= budget) break;
      Index* const sizes[] = {&shape_.batch, &shape_.heads_kv, &ratio,        &shape_.len_q,
                              &shape_.len_k, &shape_.dim,      &shape_.dim_v, &shape_.len_q};
      Index& size = *sizes[random_.between(0, 7)];
      if (size > 1) size = std::max<Index>(1, size * 2 / 3);
    }
    say(fmt::format("{} B{} Hq{} Hkv{} Sq{} Sk{} D{} Dv{}", name_of(type_), shape_.batch,
                    shape_.heads_q, shape_.heads_kv, shape_.len_q, shape_.len_k, shape_.dim,
                    shape_.dim_v));
  }

  // Draws cu_seqlens and, sometimes, a few rows after the last sequence. Returns the number of all
  // rows, and in `longest` a max_seqlen that may exceed the longest sequence.
  Index pack(Tensor& begins, const char* name, Index& longest) {
    Slab* const slab = add(name, i32, {shape_.batch + 1}, {});
    slab->tensor.strides[0] = 1;
    Index at = 0;
    auto* const values = static_cast<std::int32_t*>(slab->tensor.data);
    values[0] = 0;
    for (Index b = 0; b < shape_.batch; ++b) {
      const Index length = random_.chance(0.15)  ? 0
                           : random_.chance(0.3) ? longest
                                                 : random_.between(0, longest);
      values[b + 1] = static_cast<std::int32_t>(at += length);
    }
    begins = slab->tensor;
    const Index total = at + (random_.chance(0.3) ? random_.between(1, 5) : 0);
    Index most = 0;
    for (Index b = 0; b < shape_.batch; ++b)
      most = std::max<Index>(most, values[b + 1] - values[b]);
    longest = random_.chance(0.3) ? std::min(longest, total) : most;
    return total;
  }

  void use(Tensor& used, const char* name, const Tensor& begins, Index longest) {
    Slab* const slab = add(name, i32, {shape_.batch}, {});
    slab->tensor.strides[0] = 1;
    auto* const values = static_cast<std::int32_t*>(slab->tensor.data);
    for (Index b = 0; b < shape_.batch; ++b) {
      Index most = longest;
      if (begins.given()) {
        const auto* const at = static_cast<const std::int32_t*>(begins.data);
        most = at[b + 1] - at[b];
      }
      values[b] = static_cast<std::int32_t>(random_.between(0, most));
    }
    used = slab->tensor;
  }

  double draw_value(double multiplier, bool logits) {
    switch (family_) {
      case Family::outliers:
        return random_.normal() * (random_.chance(0.01) ? 60 : 1) * multiplier;
      case Family::offset:
        return (random_.normal() + 3) * multiplier;
      case Family::integers:
        return std::round(random_.normal() * 2);
      case Family::large_logits:
        return random_.normal() * (logits ? multiplier : 1);
      case Family::normal:
        break;
    }
    return random_.normal() * multiplier;
  }

  void draw_operands() {
    Attention& a = p_.attention;
    if (random_.chance(0.35)) {
      const double usual = 1 / std::sqrt(double(shape_.dim));
      a.scale = random_.chance(0.05)   ? 0
                : random_.chance(0.05) ? -usual
                                       : usual * (0.3 + 2 * random_.uniform());
      say(fmt::format(" scale={:.6g}", *a.scale));
    }
    family_ = random_.pick({Family::normal, Family::normal, Family::normal, Family::outliers,
                            Family::large_logits, Family::offset, Family::integers});
    constexpr const char* kNames[] = {"normal", "outliers", "large-logits", "offset", "integers"};
    say(fmt::format(" values={}", kNames[static_cast<int>(family_)]));
    double multiplier = 1;
    if (family_ == Family::large_logits) {
      const double scale = std::max(std::fabs(scale_of(a, shape_)), 1e-3);
      multiplier = std::min(std::sqrt(300 / (std::sqrt(double(shape_.dim)) * scale)), 500.0);
    }
    Sizes q{shape_.batch, shape_.heads_q, shape_.len_q, shape_.dim};
    Sizes k{shape_.batch, shape_.heads_kv, shape_.len_k, shape_.dim};
    Sizes v{shape_.batch, shape_.heads_kv, shape_.len_k, shape_.dim_v};
    if (shape_.packed) {
      const Index total_q = pack(a.cu_seqlens_q, "cu_seqlens_q", shape_.len_q);
      const Index total_k = pack(a.cu_seqlens_k, "cu_seqlens_k", shape_.len_k);
      a.max_seqlen_q = shape_.len_q;
      a.max_seqlen_k = shape_.len_k;
      q = {total_q, shape_.heads_q, shape_.dim};
      k = {total_k, shape_.heads_kv, shape_.dim};
      v = {total_k, shape_.heads_kv, shape_.dim_v};
      say(" packed(");
      for (Index b = 0; b < shape_.batch; ++b) {
        const Sequence s = sequence_of(a, shape_, b);
        say(fmt::format("{}{}x{}", b ? " " : "", s.len_q, s.len_k));
      }
      say(")");
    }
    const SlabLayout input{.may_broadcast = true, .free_last = false, .for_tma = for_tma_};
    q_ = add("q", type_, q, input);
    k_ = add("k", type_, k, input);
    v_ = add("v", type_, v, input);
    q_->fill([&] { return draw_value(multiplier, true); });
    k_->fill([&] { return draw_value(multiplier, true); });
    v_->fill([&] { return draw_value(1, false); });
    a.q = q_->tensor;
    a.k = k_->tensor;
    a.v = v_->tensor;
    say(fmt::format(" q{} k{} v{}", strides_text(a.q), strides_text(a.k), strides_text(a.v)));
    if (random_.chance(0.15)) {
      use(a.seqused_q, "seqused_q", a.cu_seqlens_q, shape_.len_q);
      say(" seqused_q");
    }
    if (random_.chance(0.15)) {
      use(a.seqused_k, "seqused_k", a.cu_seqlens_k, shape_.len_k);
      say(" seqused_k");
    }
  }

  static std::string strides_text(const Tensor& t) {
    std::string text = "/";
    for (int axis = 0; axis < t.rank; ++axis) {
      text += (axis ? "," : "") + std::to_string(t.strides[axis]);
    }
    return text;
  }

  // Sizes that broadcast to (B, Hq, Sq, Sk), sometimes of a lower rank.
  Sizes draw_pair_sizes() {
    Sizes sizes{shape_.batch, shape_.heads_q, shape_.len_q, shape_.len_k};
    for (Index& size : sizes) {
      if (random_.chance(0.4)) size = 1;
    }
    while (sizes.size() > 1 && sizes[0] == 1 && random_.chance(0.4)) sizes.erase(sizes.begin());
    return sizes;
  }

  static std::string sizes_text(const Tensor& t) {
    std::string text;
    for (int axis = 0; axis < t.rank; ++axis) {
      text += (axis ? "x" : "") + std::to_string(t.sizes[axis]);
    }
    return text + strides_text(t);
  }

  void draw_score_features() {
    Attention& a = p_.attention;
    if (random_.chance(0.2)) {
      a.softcap = random_.pick({1.0, 5.0, 30.0, 50.0});
      say(fmt::format(" softcap={}", a.softcap));
    }
    if (random_.chance(0.3)) {
      const Type type = random_.pick({f64, f32, f16, bf16});
      bias_ = add("bias", type, draw_pair_sizes(), {.may_broadcast = true, .free_last = true});
      const double hidden = random_.chance(0.4) ? random_.pick({0.05, 0.5}) : 0;
      bias_->fill([&] { return random_.chance(hidden) ? -kInfinity : random_.normal(); });
      a.bias = bias_->tensor;
      say(fmt::format(" bias={}:{}{}", sizes_text(a.bias), name_of(type),
                      hidden > 0 ? " with -inf" : ""));
    }
    if (random_.chance(0.15)) {
      const Sizes sizes =
          random_.chance(0.5) ? Sizes{shape_.heads_q} : Sizes{shape_.batch, shape_.heads_q};
      Slab* const slab = add("alibi_slopes", f32, sizes, {});
      slab->fill([&] { return std::exp2(-8 * random_.uniform()); });
      a.alibi_slopes = slab->tensor;
      say(" alibi=" + sizes_text(a.alibi_slopes));
    }
    if (random_.chance(0.2)) {
      Slab* const slab = add("sink", f32, {shape_.heads_q}, {});
      slab->fill([&] { return random_.normal() * 2; });
      a.sink = slab->tensor;
      say(" sink");
    }
    if (random_.chance(0.2)) {
      a.dropout = {.p = random_.pick({0.01, 0.1, 0.5, 0.9}),
                   .seed = random_.next(),
                   .offset = random_.next() % 1000};
      say(fmt::format(" dropout={}", a.dropout.p));
    }
  }

  void draw_visibility() {
    Attention& a = p_.attention;
    if (random_.chance(0.4)) {
      a.causal = random_.pick({Causal::top_left, Causal::bottom_right});
      say(a.causal == Causal::top_left ? " causal=top-left" : " causal=bottom-right");
    }
    if (random_.chance(0.25)) {
      const Index longest = std::max(shape_.len_q, shape_.len_k) + 2;
      auto side = [&]() -> Index {
        if (random_.chance(0.3)) return -1;
        return random_.chance(0.5) ? random_.between(0, std::min<Index>(longest, 20))
                                   : random_.between(0, longest);
      };
      a.window = {.left = side(), .right = side()};
      say(fmt::format(" window={},{}", a.window.left, a.window.right));
    }
    if (random_.chance(0.3)) {
      Slab* const slab =
          add("mask", boolean, draw_pair_sizes(), {.may_broadcast = true, .free_last = true});
      const double density = random_.pick({0.02, 0.5, 0.95});
      slab->fill([&] { return random_.chance(density) ? 1 : 0; });
      a.mask = slab->tensor;
      say(fmt::format(" mask={} density={}", sizes_text(a.mask), density));
    }
    if (random_.chance(0.12)) draw_spans("row_spans", a.row_spans, a.q, shape_.len_q, shape_.len_k);
    if (random_.chance(0.12)) draw_spans("key_spans", a.key_spans, a.k, shape_.len_k, shape_.len_q);
  }

  // Rows and keys stand near one another, so that causal masks and windows show some pairs.
  void draw_positions() {
    Attention& a = p_.attention;
    a.batch_begin = random_.pick<Index>({0, 1, 1000});
    a.head_begin = random_.pick<Index>({0, 2, 100});
    say(fmt::format(" batch_begin={} head_begin={}", a.batch_begin, a.head_begin));
    if (shape_.packed) return;
    a.k_position = 32 * random_.between(0, 10);
    if (a.causal == Causal::bottom_right) a.causal = Causal::top_left;
    const Index blocks = (shape_.len_q + 127) / 128;
    const Sizes sizes = random_.chance(0.5) ? Sizes{blocks} : Sizes{shape_.batch, blocks};
    Slab* const slab = add("q_positions", i32, sizes, {.may_broadcast = false});
    Index n = 0, at = 0;
    slab->fill([&] {
      at = n++ % blocks == 0 ? random_.between(0, 300) : at + 128 + random_.between(0, 1) * 70;
      return double(at);
    });
    a.q_positions = slab->tensor;
    say(fmt::format(" positions={} k_position={}", sizes_text(a.q_positions), a.k_position));
  }

  // For each of `rows` rows, or each packed row of x, spans of indices around [0, length).
  void draw_spans(const char* name, Tensor& spans, const Tensor& x, Index rows, Index length) {
    const Index ends = 2 * random_.between(1, 4), batch = random_.chance(0.4) ? 1 : shape_.batch;
    const Index heads = random_.chance(0.4) ? 1 : shape_.heads_q;
    const Sizes sizes =
        shape_.packed ? Sizes{heads, x.sizes[0], ends} : Sizes{batch, heads, rows, ends};
    Slab* const slab = add(name, i32, sizes, {.may_broadcast = true, .free_last = false});
    slab->fill([&] { return double(random_.between(-2, length + 2)); });
    spans = slab->tensor;
    say(fmt::format(" {}={}", name, sizes_text(spans)));
  }

  Slab* add_gradient(const char* name, const Tensor& of, Type type, bool free_last) {
    if (!of.given() || random_.chance(0.15)) return nullptr;
    if (random_.chance(0.25)) type = f32;
    return add_output(name, type, {of.sizes.begin(), of.sizes.begin() + of.rank}, free_last);
  }

  // The gaps hold random bytes. The tensor holds NaN, or numbers if the call accumulates.
  Slab* add_output(const char* name, Type type, const Sizes& sizes, bool free_last) {
    Slab* const slab = add(name, type, sizes,
                           {.may_broadcast = false, .free_last = free_last, .for_tma = for_tma_});
    for (std::byte& byte : slab->memory) byte = static_cast<std::byte>(random_.next());
    slab->fill([&] {
      return p_.accumulate ? random_.normal() : std::numeric_limits<double>::quiet_NaN();
    });
    slab->remember();
    say(fmt::format(" {}:{}{}", name, name_of(type), strides_text(slab->tensor)));
    return slab;
  }

  void draw_outputs() {
    const Attention& a = p_.attention;
    const Type narrow = random_.chance(0.12) ? f32 : type_;
    const bool backward = random_.chance(0.8);
    Sizes rows(a.q.sizes.begin(), a.q.sizes.begin() + a.q.rank);
    rows.back() = shape_.dim_v;
    p_.out = add_output("out", narrow, rows, false);
    if (backward || random_.chance(0.6)) {
      const Sizes lse = shape_.packed ? Sizes{shape_.heads_q, a.q.sizes[0]}
                                      : Sizes{shape_.batch, shape_.heads_q, shape_.len_q};
      p_.lse = add_output("lse", type_ == f64 ? f64 : f32, lse, true);
      if (backward && random_.chance(0.3)) {
        p_.dlse = add("dlse", p_.lse->tensor.type, lse, {.may_broadcast = true, .free_last = true});
        p_.dlse->fill([&] { return random_.normal(); });
        say(" dlse");
      }
    }
    if (!backward) return;
    p_.dout = add("dout", random_.chance(0.12) ? f32 : type_, rows,
                  {.may_broadcast = true, .free_last = false, .for_tma = for_tma_});
    p_.dout->fill([&] { return draw_value(1, false); });
    say(fmt::format(" dout:{}{}", name_of(p_.dout->tensor.type), strides_text(p_.dout->tensor)));
    p_.accumulate = random_.chance(0.15);
    if (p_.accumulate) say(" accumulate");
    p_.dq = add_gradient("dq", a.q, type_, false);
    p_.dk = add_gradient("dk", a.k, type_, false);
    p_.dv = add_gradient("dv", a.v, type_, false);
    p_.dbias = add_gradient("dbias", a.bias, a.bias.type, true);
    p_.dsink = add_gradient("dsink", a.sink, f32, false);
  }

  Random random_;
  const ProblemLimits& limits_;
  RandomProblem p_;
  Shape shape_;
  Type type_ = f32;
  bool for_tma_ = false;  // of half of the 16-bit problems
  Family family_ = Family::normal;
  Slab *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *bias_ = nullptr;
};

Type type_of(const Slab* slab) { return slab ? slab->tensor.type : Type::none; }
Tensor tensor_of(const Slab* slab) { return slab ? slab->tensor : Tensor{}; }

}  // namespace

WantedTypes RandomProblem::wanted() const {
  return {.out = type_of(out),
          .dq = type_of(dq),
          .dk = type_of(dk),
          .dv = type_of(dv),
          .dbias = type_of(dbias),
          .dsink = type_of(dsink)};
}

ForwardOutputs RandomProblem::forward_outputs() const {
  return {.out = tensor_of(out), .lse = tensor_of(lse)};
}

BackwardInputs RandomProblem::backward_inputs() const {
  return {.out = tensor_of(out),
          .lse = tensor_of(lse),
          .dout = tensor_of(dout),
          .dlse = tensor_of(dlse)};
}

Gradients RandomProblem::gradients() const {
  return {.dq = tensor_of(dq),
          .dk = tensor_of(dk),
          .dv = tensor_of(dv),
          .dbias = tensor_of(dbias),
          .dsink = tensor_of(dsink),
          .accumulate = accumulate};
}

RandomProblem random_problem(std::uint64_t seed, std::uint64_t index, const ProblemLimits& limits) {
  return Builder(seed, index, limits).build();
}

}  // namespace regard::cli
