// Validation: every rule of docs/semantics.md that the caller's tensors and options must keep.
#include "problem/describe.hpp"

#include <cmath>
#include <limits>

#include "problem/mask_contents.hpp"
#include "problem/overlap.hpp"
#include "problem/refuse.hpp"
#include "problem/tensor_checks.hpp"

namespace regard {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

static_assert(kTypeCount == 7, "a type was added: whether it is a type of q, k and v");
bool is_float(Type type) { return type == f64 || type == f32 || type == f16 || type == bf16; }

// Reads the sizes from q, k and v, and checks that they agree.
Sizes read_sizes(const Attention& a, bool packed) {
  const int rank = packed ? 3 : 4;
  for (const auto& [name, tensor] : {std::pair{"q", &a.q}, {"k", &a.k}, {"v", &a.v}}) {
    require(tensor->given(), name, *tensor, "must be given");
    require(is_float(tensor->type), name, *tensor, "must be f64, f32, f16 or bf16");
    require(tensor->type == a.q.type, name, *tensor, "must have q's type");
    check_shape(name, *tensor, rank,
                packed ? "packed sequences need (total, heads, size)"
                       : "must be (batch, heads, length, size)");
    check_last_stride(name, *tensor);
  }
  const std::size_t row = packed ? 0 : 2, head = 1, column = packed ? 2 : 3;
  Sizes s;
  s.heads_q = a.q.sizes[head];
  s.heads_kv = a.k.sizes[head];
  s.dim = a.q.sizes[column];
  s.dim_v = a.v.sizes[column];
  s.rows_q = a.q.sizes[row];
  s.rows_k = a.k.sizes[row];
  require(a.k.sizes[column] == s.dim, "k", a.k, "must have q's head size");
  require(a.v.sizes[head] == s.heads_kv, "v", a.v, "must have as many heads as k");
  require(a.v.sizes[row] == s.rows_k, "v", a.v, "must be as long as k");
  require(s.heads_q >= 1, "q", a.q, "must have at least one head");
  require(s.heads_kv >= 1 && s.heads_q % s.heads_kv == 0, "k", a.k,
          "q's heads must be a multiple of k's");
  require(s.dim >= 1, "q", a.q, "the head size must be at least 1");
  require(s.dim_v >= 1, "v", a.v, "the head size must be at least 1");
  if (packed) {
    check_shape("cu_seqlens_q", a.cu_seqlens_q, 1, "must be (batch + 1)");
    require(a.cu_seqlens_q.sizes[0] >= 1, "cu_seqlens_q", a.cu_seqlens_q,
            "must have at least one element, the 0 of an empty batch");
    s.batch = a.cu_seqlens_q.sizes[0] - 1;
    s.len_q = a.max_seqlen_q;
    s.len_k = a.max_seqlen_k;
    require(s.len_q >= 0 && s.len_q <= s.rows_q, "max_seqlen_q", s.len_q,
            "must be between 0 and the rows of q");
    require(s.len_k >= 0 && s.len_k <= s.rows_k, "max_seqlen_k", s.len_k,
            "must be between 0 and the rows of k");
  } else {
    require(a.max_seqlen_q == 0, "max_seqlen_q", a.max_seqlen_q, "only packed sequences take it");
    require(a.max_seqlen_k == 0, "max_seqlen_k", a.max_seqlen_k, "only packed sequences take it");
    s.batch = a.q.sizes[0];
    require(a.k.sizes[0] == s.batch, "k", a.k, "must have q's batch size");
    require(a.v.sizes[0] == s.batch, "v", a.v, "must have q's batch size");
    s.len_q = s.rows_q;
    s.len_k = s.rows_k;
    s.rows_q *= s.batch;
    s.rows_k *= s.batch;
  }
  return s;
}

// reads_memory: the caller's memory is the host's, so that a seed in it is a number from here on.
void read_dropout(const Dropout& dropout, Problem& p, bool reads_memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(dropout.seed_words);
  require(dropout.p >= 0 && dropout.p < 1, "dropout.p", dropout.p, "must be in [0, 1)");
  require(address % sizeof(uint32) == 0, "dropout.seed_words", address,
          "must be an address that is a multiple of 4");
  if (dropout.p == 0) return;
  p.seed_in_memory = dropout.seed_words && !reads_memory;
  if (p.seed_in_memory) {
    require(dropout.offset >> 32 == 0, "dropout.offset", dropout.offset,
            "must be below 2^32 for a seed in a GPU's memory");
    p.dropout = dropout_params_at(dropout.p, address, uint32(dropout.offset));
  } else {
    const uint64 seed = dropout.seed_words ? seed_in(dropout.seed_words) : dropout.seed;
    p.dropout = dropout_params(dropout.p, seed, dropout.offset);
  }
}

// The last row of a sequence sees every key that is not too far to its left.
bool hides_later_keys(const Problem& p) {
  const bool has_last_row_only =
      p.sizes.len_q <= 1 && !p.mask_params.top_left && !p.sequences.positions.given;
  return p.mask_params.right >= 0 && !has_last_row_only;
}

void read_options(const Attention& a, const VisibleTensors& visible, Problem& p) {
  const double scale = a.scale.value_or(1 / std::sqrt(double(p.sizes.dim)));
  require(std::isfinite(scale), "scale", scale, "must be finite");
  require(computes_in_f64(p) || std::fabs(scale) <= 0x1p120, "scale", scale,
          "must be at most 2^120 in size for f32 arithmetic");
  require(std::isfinite(a.softcap) && a.softcap >= 0, "softcap", a.softcap,
          "must be finite and not negative (0 = off)");
  require(a.causal <= Causal::bottom_right, "causal", int(a.causal), "is no such alignment");
  require(a.precision <= Precision::bf16, "precision", int(a.precision), "is no such precision");
  require(a.window.left >= -1, "window.left", a.window.left, "must be -1 (unbounded) or more");
  require(a.window.right >= -1, "window.right", a.window.right, "must be -1 (unbounded) or more");

  // Positions are below 2^31.
  const Positions& at = p.sequences.positions;
  const std::int64_t reach = at.given ? std::int64_t(kMaxSize) + 1 : p.sizes.len_q + p.sizes.len_k;
  const auto bound = [&](std::int64_t side) { return side >= reach ? -1 : side; };
  p.mask_params.left = bound(a.window.left);
  p.mask_params.right = a.causal == Causal::none ? bound(a.window.right) : 0;
  p.mask_params.top_left = a.causal == Causal::top_left;
  p.score = {.scale = scale, .softcap = a.softcap};
  p.precision = uint8(a.precision);
  p.deterministic = a.deterministic;
  p.continues = a.continue_from && !p.backward;
  // A sink is divided by the scale, where scores are not multiplied by it.
  const bool positive = scale > (computes_in_f64(p) ? 0x1p-900 : 0x1p-100);
  p.features = {
      .softcap = a.softcap > 0,
      .bias = a.bias.given(),
      .mask = visible.mask.given(),
      .row_spans = visible.row_spans.given(),
      .key_spans = visible.key_spans.given(),
      .alibi = a.alibi_slopes.given(),
      .sink = a.sink.given(),
      .dropout = p.dropout.threshold > 0,
      .interval = p.mask_params.left >= 0 || hides_later_keys(p),
      .signed_scale = !positive,
  };
  // Kernels know positions only where something goes by them.
  Features& on = p.features;
  on.positions = (at.given && (on.interval || on.alibi || on.dropout)) ||
                 (on.dropout && (at.first_batch > 0 || at.first_head > 0));
}

void read_visible(const VisibleTensors& visible, Problem& p, NullData nulls) {
  const auto& [mask, row_spans, key_spans] = visible;
  const Sizes& s = p.sizes;
  if (mask.given()) {
    require(mask.type == boolean, "mask", mask, "must be bool");
    p.mask = broadcast_view("mask", mask, {s.batch, s.heads_q, s.len_q, s.len_k});
  }
  if (row_spans.given()) p.row_spans = span_view("row_spans", row_spans, p, Side::queries);
  if (key_spans.given()) p.key_spans = span_view("key_spans", key_spans, p, Side::keys);
  if (nulls == NullData::allowed) return;
  check_data("mask", mask);
  check_data("row_spans", row_spans);
  check_data("key_spans", key_spans);
}

void read_score_tensors(const Attention& a, Problem& p, NullData nulls) {
  const Sizes& s = p.sizes;
  const std::array<std::int64_t, 4> scores{s.batch, s.heads_q, s.len_q, s.len_k};
  if (a.bias.given()) {
    require(is_float(a.bias.type), "bias", a.bias, "must be f64, f32, f16 or bf16");
    p.bias = broadcast_view("bias", a.bias, scores);
    const std::size_t absent = 4 - rank_of(a.bias);
    for (std::size_t axis = absent; axis < 4; ++axis)
      p.bias_sizes[axis] = a.bias.sizes[axis - absent];
  }
  if (a.alibi_slopes.given()) {
    require(a.alibi_slopes.type == f32, "alibi_slopes", a.alibi_slopes, "must be f32");
    p.alibi_slopes = head_view("alibi_slopes", a.alibi_slopes, s, a.alibi_slopes.rank == 2);
  }
  if (a.sink.given()) {
    require(a.sink.type == f32, "sink", a.sink, "must be f32");
    p.sink = head_view("sink", a.sink, s, false);
  }
  if (nulls == NullData::refused) {
    check_data("bias", a.bias);
    check_data("alibi_slopes", a.alibi_slopes);
    check_data("sink", a.sink);
  }
}

View optional_like(const char* name, const Tensor& tensor, const Tensor& like, const Problem& p,
                   Access access) {
  if (!tensor.given()) return {};
  if (tensor.type != p.type && tensor.type != f32) {
    refuse(name, tensor,
           std::string("must be ") + name_of(p.type) + (p.type == f32 ? "" : " or f32"));
  }
  return row_view(name, tensor, like, p.packed, access);
}

// The type in which sums are kept, which is also that of the lse.
Type sums_type(const Problem& p) { return computes_in_f64(p) ? f64 : f32; }

// out and dout: q's sizes with v's head size.
View out_view(const char* name, const Tensor& tensor, const Attention& a, const Problem& p,
              Access access) {
  require(tensor.given(), name, tensor, "must be given");
  Tensor like = a.q;
  like.sizes[p.packed ? 2 : 3] = p.sizes.dim_v;
  return optional_like(name, tensor, like, p, access);
}

// The given delta of each row, or out and dlse, of which it is made.
void read_delta(const Attention& a, const BackwardInputs& from, Problem& p) {
  if (from.delta.given()) {
    require(!from.out.given(), "out", from.out, "must not be given with delta");
    require(!from.dlse.given(), "dlse", from.dlse, "must not be given with delta");
    p.delta = lse_view("delta", from.delta, p, Access::read);
    return;
  }
  p.out = out_view("out", from.out, a, p, Access::read);
  if (from.dlse.given()) p.dlse = lse_view("dlse", from.dlse, p, Access::read);
}

}  // namespace

Problem describe(const Attention& a, Pass pass, NullData nulls, TableCopies* copies) {
  require(pass <= Pass::backward, "pass", int(pass), "is no such pass");
  const VisibleTensors visible = visible_tensors(a);
  Problem p;
  p.backward = pass == Pass::backward;
  p.packed = a.cu_seqlens_q.given() || a.cu_seqlens_k.given();
  if (p.packed) {
    require(a.cu_seqlens_q.given(), "cu_seqlens_q", a.cu_seqlens_q,
            "must be given with cu_seqlens_k");
  }
  p.varlen = p.packed || a.seqused_q.given() || a.seqused_k.given();
  p.sizes = read_sizes(a, p.packed);
  p.type = a.q.type;
  require(p.sizes.rows_q <= kMaxSize, "q", a.q, "batch times length must be below 2^31");
  require(p.sizes.rows_k <= kMaxSize, "k", a.k, "batch times length must be below 2^31");
  if (a.visible.given()) check_made_for(a.visible, p);
  p.sequences = read_sequences(a, p.sizes, p.packed, nulls, copies);
  read_dropout(a.dropout, p, copies != nullptr);
  read_options(a, visible, p);
  p.q = checked_row_view(a.q, p.packed);
  p.k = checked_row_view(a.k, p.packed);
  p.v = checked_row_view(a.v, p.packed);
  if (nulls == NullData::refused) {
    check_data("q", a.q);
    check_data("k", a.k);
    check_data("v", a.v);
  }
  read_visible(visible, p, nulls);
  read_score_tensors(a, p, nulls);
  return p;
}

Problem describe_mask(const Attention& a, NullData nulls, TableCopies* copies) {
  require(!a.visible.given(), "visible", "a Mask", "a Mask is made of mask, row_spans, key_spans");
  require(a.mask.given() || a.row_spans.given() || a.key_spans.given(), "mask", a.mask,
          "a Mask is made of mask, row_spans or key_spans: one of them must be given");
  return describe(a, Pass::forward, nulls, copies);
}

Problem with_gradients(const Problem& forward) {
  Problem p = forward;
  p.backward = true;
  p.continues = false;
  p.gradients_named = true;
  p.dout = p.out;
  p.dq = p.q;
  p.dk = p.k;
  p.dv = p.v;
  p.dsink = p.sink;
  return p;
}

Problem describe_forward(const Attention& a, const ForwardOutputs& to, TableCopies* copies) {
  Problem p = describe(a, Pass::forward, NullData::refused, copies);
  p.out = out_view("out", to.out, a, p, Access::write);
  check_data("out", to.out);
  if (p.continues) {
    require(to.lse.given(), "lse", to.lse, "must be given with continue_from");
    if (to.out.type != sums_type(p)) {
      refuse("out", to.out,
             std::string("must be ") + name_of(sums_type(p)) + " with continue_from");
    }
  }
  if (to.lse.given()) p.lse = lse_view("lse", to.lse, p, Access::write);
  check_data("lse", to.lse);
  check_distinct(a, to);
  if (p.sizes.rows_q == 0) p.sizes.batch = 0;  // nothing to write, however many sequences
  return p;
}

Problem describe_backward(const Attention& a, const BackwardInputs& from, const Gradients& to,
                          TableCopies* copies) {
  Problem p = describe(a, Pass::backward, NullData::refused, copies);
  read_delta(a, from, p);
  p.dout = out_view("dout", from.dout, a, p, Access::read);
  require(from.lse.given(), "lse", from.lse, "must be given");
  p.lse = lse_view("lse", from.lse, p, Access::read);
  p.dq = optional_like("dq", to.dq, a.q, p, Access::write);
  p.dk = optional_like("dk", to.dk, a.k, p, Access::write);
  p.dv = optional_like("dv", to.dv, a.v, p, Access::write);
  if (to.dbias.given()) {
    require(a.bias.given(), "dbias", to.dbias, "needs a bias");
    require(to.dbias.type == a.bias.type || to.dbias.type == f32, "dbias", to.dbias,
            "must have the bias's type or f32");
    p.dbias = like_view("dbias", to.dbias, a.bias, p);
  }
  if (to.dsink.given()) {
    require(a.sink.given(), "dsink", to.dsink, "needs a sink");
    require(to.dsink.type == f32, "dsink", to.dsink, "must be f32");
    p.dsink = head_view("dsink", to.dsink, p.sizes, false);
    check_overlap("dsink", to.dsink);
  }
  for (const auto& [name, tensor] : {std::pair{"out", &from.out},
                                     {"lse", &from.lse},
                                     {"dout", &from.dout},
                                     {"dlse", &from.dlse},
                                     {"delta", &from.delta},
                                     {"dq", &to.dq},
                                     {"dk", &to.dk},
                                     {"dv", &to.dv},
                                     {"dbias", &to.dbias},
                                     {"dsink", &to.dsink}}) {
    check_data(name, *tensor);
  }
  check_distinct(a, from, to);
  p.accumulate = to.accumulate;
  p.gradients_named = true;
  // Nothing to write for any sequence, however many there are.
  const bool wants_keys = p.sizes.rows_k > 0 && (p.dk.given() || p.dv.given());
  if (p.sizes.rows_q == 0 && !wants_keys) p.sizes.batch = 0;
  return p;
}

View describe_keep(const Problem& p, const Tensor& keep) {
  const Sizes& s = p.sizes;
  require(keep.given() && keep.type == boolean, "keep", keep, "must be bool");
  check_shape("keep", keep, 4, "must be (B, Hq, Sq, Sk)");
  const std::array<std::int64_t, 4> sizes{s.batch, s.heads_q, s.len_q, s.len_k};
  require(keep.sizes == sizes, "keep", keep, "must be (B, Hq, Sq, Sk)");
  check_data("keep", keep);
  check_overlap("keep", keep);
  return broadcast_view("keep", keep, sizes);
}

}  // namespace regard
