// `regard explain`: which kernel would run, and why; nothing is computed.
#include <fmt/core.h>

#include "command_line/arguments.hpp"
#include "output/json_line.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

int run_explain(const ExplainArguments& arguments) {
  const Attention attention = described_attention(arguments.shape, arguments.attention);
  const Pass pass = arguments.backward ? Pass::backward : Pass::forward;
  const Run run = described_run(arguments.run);
  if (arguments.compile && explain(attention, pass, run).supported) prepare(attention, pass, run);
  const Explanation e = explain(attention, pass, run);
  if (arguments.json) {
    JsonLine line;
    line.boolean("supported", e.supported);
    line.text("backend", e.backend);
    line.text("kernel", e.kernel);
    line.text("text", e.text);
    line.integer("workspace", static_cast<std::int64_t>(e.workspace));
    line.number("pairs", e.pairs);
    line.number("flops", e.flops);
    fmt::print("{}\n", line.str());
  } else {
    fmt::print("{}", e.text);
  }
  if (e.supported) return 0;
  std::fflush(stdout);
  fmt::print(stderr, "regard: no backend can run this; the text above says why\n");
  return 2;
}

}  // namespace regard::cli
