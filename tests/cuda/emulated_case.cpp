// Runs one random problem on the emulated GPU against float64 and says what disagrees:
//   emulated_case [type=f16] [len_q=70] [dim=64] [bias=f32] [causal=2] [backend=emulated:mma] ...
// Members as in tests/cpu/case.hpp. only=forward leaves the backward pass out.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

Type type_named(const std::string& name) {
  for (const Type type : {f64, f32, f16, bf16}) {
    if (name == name_of(type)) return type;
  }
  return Type::none;
}

}  // namespace

int main(int count, char** words) {
  std::map<std::string, std::string> given;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto at = word.find('=');
    given[word.substr(0, at)] = at == word.npos ? "1" : word.substr(at + 1);
  }
  const auto number = [&](const char* name, double otherwise) {
    return given.count(name) ? std::atof(given[name].c_str()) : otherwise;
  };
  Settings s;
  s.type = type_named(given.count("type") ? given["type"] : "f16");
  s.batch = int(number("batch", 1));
  s.heads_kv = int(number("heads_kv", 1));
  s.heads_q = int(number("heads_q", double(s.heads_kv)));
  s.len_q = int(number("len_q", 70));
  s.len_k = int(number("len_k", 90));
  s.dim = int(number("dim", 32));
  s.dim_v = int(number("dim_v", double(s.dim)));
  s.causal = Causal(int(number("causal", 0)));
  s.window = {int(number("left", -1)), int(number("right", -1))};
  s.softcap = number("softcap", 0);
  if (given.count("scale")) s.scale = number("scale", 1);
  s.bias = type_named(given["bias"]);
  for (const char axis : given["broadcast"]) s.bias_broadcast[std::size_t(axis - '0')] = true;
  s.mask = number("mask", 0) != 0;
  for (const char axis : given["mask_broadcast"]) s.mask_broadcast[std::size_t(axis - '0')] = true;
  s.mask_reversed = number("mask_reversed", 0) != 0;
  s.alibi = number("alibi", 0) != 0;
  s.sink = number("sink", 0) != 0;
  s.dropout = number("dropout", 0);
  s.packed = number("packed", 0) != 0;
  s.seqused = number("seqused", 0) != 0;
  s.dlse = number("dlse", 0) != 0;
  s.accumulate = number("accumulate", 0) != 0;
  s.wide_results = number("wide_results", 0) != 0;
  s.gaps = number("gaps", 0) != 0;
  s.seed = std::uint64_t(number("seed", 1));
  const Run run{.backend = given.count("backend") ? given["backend"] : "emulated:mma"};
  try {
    std::string wrong;
    if (given["only"] == "forward") {
      const Case got(s), want(s, Case::Values::exact);
      got.forward(run);
      want.forward({.backend = "reference"});
      for (const auto& [name, x, y] :
           {std::tuple{"out", &got.out, &want.out}, std::tuple{"lse", &got.lse, &want.lse}}) {
        const double error = row_error(*x, *y, 1);
        const bool is_out = x == &got.out;
        const double allowed =
            std::max(tolerance(x->tensor().type), is_out ? tolerance(s.type) : 0);
        std::printf("%s: error %.3g, tolerance %.3g\n", name, error, allowed);
        if (!(error <= allowed)) wrong += std::string(name) + " is off\n";
      }
    } else {
      wrong = disagreement(s, run);
    }
    std::printf("%s", wrong.empty() ? "right\n" : wrong.c_str());
    return wrong.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
