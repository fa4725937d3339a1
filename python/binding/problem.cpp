#include "problem.hpp"

#include <array>
#include <string_view>

namespace regard::python {

namespace {

// The value of `name` in a list of names; Error for another.
template <class Value, std::size_t N>
Value named(const char* argument, const std::string& name,
            const std::array<std::pair<std::string_view, Value>, N>& values) {
  std::string all;
  for (const auto& [word, value] : values) {
    if (word == name) return value;
    all += (all.empty() ? "" : ", ") + std::string(word);
  }
  throw Error(Code::invalid_argument, argument, "'" + name + "'", "must be one of " + all);
}

constexpr std::array<std::pair<std::string_view, Causal>, 3> kCausal{
    {{"none", Causal::none},
     {"top_left", Causal::top_left},
     {"bottom_right", Causal::bottom_right}}};
constexpr std::array<std::pair<std::string_view, Precision>, 3> kPrecision{
    {{"full", Precision::full}, {"tf32", Precision::tf32}, {"bf16", Precision::bf16}}};

}  // namespace

Tensor Problem::place(const char* argument, const Array* array) const {
  if (!array || !array->tensor.given()) return {};
  if (array->device != device) {
    throw Error(Code::invalid_argument, argument, "an array on " + device_name(array->device),
                "must be on " + device_name(device) + ", where q is");
  }
  return array->tensor;
}

Problem problem_of(const Array& q, const Array& k, const Array& v, const Arrays& more,
                   const Settings& settings) {
  Problem problem{.device = q.device};
  const auto keep = [&](const char* argument, const Array* array) {
    if (array && array->owner.is_valid()) problem.owners.push_back(array->owner);
    return problem.place(argument, array);
  };
  Attention& a = problem.attention;
  a.q = keep("q", &q);
  a.k = keep("k", &k);
  a.v = keep("v", &v);
  const std::pair<const char*, Tensor*> fields[] = {
      {"bias", &a.bias},
      {"mask", &a.mask},
      {"alibi_slopes", &a.alibi_slopes},
      {"sink", &a.sink},
      {"cu_seqlens_q", &a.cu_seqlens_q},
      {"cu_seqlens_k", &a.cu_seqlens_k},
      {"seqused_q", &a.seqused_q},
      {"seqused_k", &a.seqused_k},
  };
  for (const auto& [name, field] : fields) {
    if (const auto found = more.find(name); found != more.end()) {
      *field = keep(name, found->second);
    }
  }
  a.max_seqlen_q = settings.max_seqlen_q;
  a.max_seqlen_k = settings.max_seqlen_k;
  a.scale = settings.scale;
  a.softcap = settings.softcap;
  a.causal = named("causal", settings.causal, kCausal);
  a.window = {.left = settings.window.first, .right = settings.window.second};
  a.dropout = {
      .p = settings.dropout_p, .seed = settings.dropout_seed, .offset = settings.dropout_offset};
  a.precision = named("precision", settings.precision, kPrecision);
  a.deterministic = settings.deterministic;
  return problem;
}

Run run_of(const Problem& problem, const std::string& device, std::uintptr_t stream, int threads,
           const std::string& backend) {
  Run run{.stream = reinterpret_cast<void*>(stream), .threads = threads, .backend = backend};
  if (device.empty()) {
    if (problem.device != Array::kHost) run.device = cuda(problem.device);
  } else if (device.rfind("cuda:", 0) == 0 && device.size() < 9 &&
             device.find_first_not_of("0123456789", 5) == std::string::npos && device.size() > 5) {
    run.device = cuda(std::stoi(device.substr(5)));
  } else if (device != "cpu") {
    run.device = chip(device);
  }
  return run;
}

}  // namespace regard::python
