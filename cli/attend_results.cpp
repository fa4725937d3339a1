// Where the results of `regard attend` go.
#include <fmt/core.h>

#include <filesystem>

#include "attend.hpp"
#include "command_line/parse.hpp"
#include "files/npy.hpp"
#include "files/output_file.hpp"
#include "files/safetensors.hpp"

namespace regard::cli {

namespace {

bool is_one_file(const std::string& target) {
  return target.ends_with(".safetensors") || is_stream(target);
}

void write_folder(const std::string& target,
                  const std::vector<std::pair<std::string, Tensor>>& results) {
  std::error_code failure;
  std::filesystem::create_directories(target, failure);
  if (failure) throw UsageError(fmt::format("--out = {}: {}", target, failure.message()));
  for (const auto& [name, tensor] : results) write_npy(target + "/" + name + ".npy", tensor);
}

}  // namespace

void check_target(const std::string& target, const AttendInputs& in) {
  if (target.empty() || is_one_file(target)) return;
  if (in.attention.q.type == bf16 || in.attention.bias.type == bf16) {
    throw UsageError(
        fmt::format("--out = {}: .npy has no bf16; name a .safetensors file, for "
                    "example --out {}.safetensors",
                    target, target.substr(0, target.find_last_not_of('/') + 1)));
  }
  std::error_code ignored;
  const auto status = std::filesystem::status(target, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status)) {
    throw UsageError(
        fmt::format("--out = {}: is a file; name a directory or NAME.safetensors", target));
  }
}

std::vector<std::string> write_results(const std::string& target, const AttendResults& r) {
  const std::pair<const char*, const Array*> all[] = {
      {"out", &r.out}, {"lse", &r.lse},     {"dq", &r.dq},      {"dk", &r.dk},
      {"dv", &r.dv},   {"dbias", &r.dbias}, {"dsink", &r.dsink}};
  std::vector<std::pair<std::string, Tensor>> results;
  std::vector<std::string> names;
  for (const auto& [name, array] : all) {
    if (!array->given()) continue;
    results.emplace_back(name, array->tensor());
    names.emplace_back(name);
  }
  if (is_one_file(target)) {
    write_safetensors(target, results);
  } else {
    write_folder(target, results);
  }
  return names;
}

}  // namespace regard::cli
