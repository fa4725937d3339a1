// Turns flags into the library's values. The library itself checks how they fit together.
#include <fmt/core.h>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

Attention without_tensors(const AttentionFlags& flags) {
  Attention a = flags.numbers;
  a.causal = parse_causal(flags.causal);
  a.window = parse_window(flags.window);
  return a;
}

Attention described_attention(const ShapeFlags& shape, const AttentionFlags& flags) {
  const Sizes q = parse_shape(shape.q, "--q");
  if (q.size() != 4) {
    throw UsageError(fmt::format(
        "--q = \"{}\": must be BATCHxHEADSxLENGTHxSIZE, for example 2x32x4096x128", shape.q));
  }
  const Type type = parse_type(shape.type.empty() ? "f32" : shape.type, "--type");
  const Index heads_kv = shape.kv_heads > 0 ? shape.kv_heads : q[1];
  const Index len_k = shape.kv_len >= 0 ? shape.kv_len : q[2];
  Attention a = without_tensors(flags);
  a.q = dense_tensor(type, q);
  a.k = dense_tensor(type, {q[0], heads_kv, len_k, q[3]});
  a.v = dense_tensor(type, {q[0], heads_kv, len_k, shape.dim_v > 0 ? shape.dim_v : q[3]});
  a.bias = parse_tensor(shape.bias, "--bias", type);
  a.mask = parse_tensor(shape.mask, "--mask", boolean);
  a.row_spans = parse_tensor(shape.row_spans, "--row-spans", i32);
  a.key_spans = parse_tensor(shape.key_spans, "--key-spans", i32);
  a.q_positions = parse_tensor(shape.q_positions, "--q-positions", i32);
  if (shape.alibi) a.alibi_slopes = dense_tensor(f32, {q[1]});
  if (shape.sink) a.sink = dense_tensor(f32, {q[1]});
  return a;
}

Run described_run(const RunFlags& flags) {
  Run run;
  run.device = parse_device(flags.device);
  run.backend = flags.backend;
  run.threads = flags.threads;
  allow_compilation(!flags.forbid_compiling);
  return run;
}

}  // namespace regard::cli
