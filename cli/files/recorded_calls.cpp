// Reads the lines strictly: a field that is skipped would leave a kernel uncompiled.
#include "files/recorded_calls.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "command_line/parse.hpp"
#include "files/input_file.hpp"

namespace regard::cli {

namespace {

using Value = nlohmann::json;

// A made-up address, far from those of other tensors, with the alignment that is told.
void* address(int number, std::uintptr_t offset) {
  return reinterpret_cast<void*>((std::uintptr_t(number) << 40) + offset);
}

template <std::size_t N>
int index_in(const char* const (&names)[N], const Value& value) {
  const std::string& name = value.get_ref<const std::string&>();
  for (std::size_t n = 0; n < N; ++n) {
    if (name == names[n]) return int(n);
  }
  throw UsageError("\"" + name + "\" is not known");
}

void read_tensor(const Value& value, int number, Tensor& tensor) {
  static constexpr const char* kTypes[] = {"none", "f64", "f32", "f16", "bf16", "bool", "i32"};
  static_assert(std::size(kTypes) == kTypeCount);
  tensor.type = Type(index_in(kTypes, value.at("type")));
  const auto sizes = value.at("sizes").get<std::vector<std::int64_t>>();
  const auto strides = value.at("strides").get<std::vector<std::int64_t>>();
  if (sizes.size() > tensor.sizes.size() || sizes.size() != strides.size()) {
    throw UsageError("sizes and strides must be as many, four at most");
  }
  tensor.rank = int(sizes.size());
  std::copy(sizes.begin(), sizes.end(), tensor.sizes.begin());
  std::copy(strides.begin(), strides.end(), tensor.strides.begin());
  tensor.data = address(number, value.at("offset").get<std::uintptr_t>() % 256);
}

bool read_tensor(const std::string& field, const Value& value, PlannedCall& call) {
  const bool backward = call.pass == Pass::backward;
  Attention& a = call.attention;
  const std::pair<const char*, Tensor*> tensors[] = {
      {"q", &a.q},
      {"k", &a.k},
      {"v", &a.v},
      {"bias", &a.bias},
      {"mask", &a.mask},
      {"row_spans", &a.row_spans},
      {"key_spans", &a.key_spans},
      {"alibi_slopes", &a.alibi_slopes},
      {"sink", &a.sink},
      {"cu_seqlens_q", &a.cu_seqlens_q},
      {"cu_seqlens_k", &a.cu_seqlens_k},
      {"seqused_q", &a.seqused_q},
      {"seqused_k", &a.seqused_k},
      {"q_positions", &a.q_positions},
      {"out", backward ? &call.inputs.out : &call.outputs.out},
      {"lse", backward ? &call.inputs.lse : &call.outputs.lse},
      {"dout", &call.inputs.dout},
      {"dlse", &call.inputs.dlse},
      {"delta", &call.inputs.delta},
      {"dq", &call.gradients.dq},
      {"dk", &call.gradients.dk},
      {"dv", &call.gradients.dv},
      {"dbias", &call.gradients.dbias},
      {"dsink", &call.gradients.dsink},
  };
  int number = 0;
  for (const auto& [name, tensor] : tensors) {
    ++number;
    if (field != name) continue;
    read_tensor(value, number, *tensor);
    return true;
  }
  return false;
}

bool read_option(const std::string& field, const Value& value, PlannedCall& call) {
  static constexpr const char* kCausal[] = {"none", "top_left", "bottom_right"};
  static constexpr const char* kPrecision[] = {"full", "tf32", "bf16"};
  Attention& a = call.attention;
  if (field == "max_seqlen_q") {
    a.max_seqlen_q = value.get<std::int64_t>();
  } else if (field == "max_seqlen_k") {
    a.max_seqlen_k = value.get<std::int64_t>();
  } else if (field == "k_position") {
    a.k_position = value.get<std::int64_t>();
  } else if (field == "batch_begin") {
    a.batch_begin = value.get<std::int64_t>();
  } else if (field == "head_begin") {
    a.head_begin = value.get<std::int64_t>();
  } else if (field == "scale") {
    a.scale = value.get<double>();
  } else if (field == "softcap") {
    a.softcap = value.get<double>();
  } else if (field == "causal") {
    a.causal = Causal(index_in(kCausal, value));
  } else if (field == "window") {
    a.window = {.left = value.at(0).get<std::int64_t>(), .right = value.at(1).get<std::int64_t>()};
  } else if (field == "dropout_p") {
    a.dropout.p = value.get<double>();
  } else if (field == "dropout_seed_in_memory") {
    static constexpr std::uint32_t kSeed[2] = {};
    a.dropout.seed_words = value.get<bool>() ? kSeed : nullptr;
  } else if (field == "precision") {
    a.precision = Precision(index_in(kPrecision, value));
  } else if (field == "deterministic") {
    a.deterministic = value.get<bool>();
  } else if (field == "continue_from") {
    a.continue_from = value.get<bool>();
  } else if (field == "accumulate") {
    call.gradients.accumulate = value.get<bool>();
  } else if (field == "gradients_follow") {
    call.gradients_follow = value.get<bool>();
  } else if (field == "backend") {
    call.backend = value.get<std::string>();
  } else {
    return false;
  }
  return true;
}

RecordedCall read_line(const std::string& line) {
  static constexpr const char* kPasses[] = {"forward", "backward"};
  const Value object = Value::parse(line);
  RecordedCall recorded;
  recorded.chip = object.at("chip").get<std::string>();
  recorded.call.pass = Pass(index_in(kPasses, object.at("pass")));
  for (const auto& [field, value] : object.items()) {
    if (field == "chip" || field == "pass") continue;
    if (!read_tensor(field, value, recorded.call) && !read_option(field, value, recorded.call)) {
      throw UsageError("the field \"" + field + "\" is not known");
    }
  }
  return recorded;
}

}  // namespace

std::vector<RecordedCall> read_recorded_calls(const std::string& path) {
  const InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size(), "calls");
  std::istringstream lines(text);
  std::vector<RecordedCall> calls;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      calls.push_back(read_line(line));
      calls.back().call.origin = fmt::format("{}:{}", path, number);
    } catch (const std::exception& error) {
      throw UsageError(fmt::format("{}:{}: is no recorded call: {}", path, number, error.what()));
    }
  }
  if (calls.empty()) throw UsageError(fmt::format("{}: holds no recorded call", path));
  return calls;
}

}  // namespace regard::cli
