// `regard explain`: which kernel would run, and why; nothing is computed.
#include "command_line/arguments.hpp"
#include "output/json.hpp"
#include "output/output.hpp"
#include "regard/cuda.hpp"

namespace regard::cli {

int run_explain(const ExplainArguments& arguments) {
  const Attention attention = described_attention(arguments.shape, arguments.attention);
  const Pass pass = arguments.backward ? Pass::backward : Pass::forward;
  const Run run = described_run(arguments.run);
  if (arguments.compile && explain(attention, pass, run).supported) prepare(attention, pass, run);
  const Explanation e = explain(attention, pass, run);
  if (arguments.json) {
    const Json fields = Fields{
        {"supported", e.supported}, {"backend", e.backend}, {"kernel", e.kernel}, {"text", e.text},
        {"workspace", e.workspace}, {"pairs", e.pairs},     {"flops", e.flops}};
    output::print("{}\n", fields.text());
  } else {
    output::print("{}", e.text);
  }
  if (e.supported) return 0;
  output::flush();
  output::error("no backend can run this; the text above says why");
  return 2;
}

}  // namespace regard::cli
