// Where the results of `regard attend` go.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
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

// The names of the tensors that a call gives.
std::vector<std::string> result_names(const AttendInputs& in, bool backward) {
  std::vector<std::string> names{"out", "lse"};
  if (backward) names.insert(names.end(), {"dq", "dk", "dv"});
  if (backward && in.attention.bias.given()) names.emplace_back("dbias");
  if (backward && in.attention.sink.given()) names.emplace_back("dsink");
  return names;
}

std::string file_in(const std::string& folder, const std::string& name) {
  return folder + "/" + name + ".npy";
}

// Why files cannot be made in a folder, which may still have to be made; "" where nothing is known
// to be in the way.
std::string folder_fault(std::filesystem::path folder) {
  std::error_code failure;
  while (!std::filesystem::exists(std::filesystem::symlink_status(folder, failure))) {
    if (failure == std::errc::filename_too_long) return failure.message();
    folder = folder.parent_path();
    if (folder.empty()) folder = ".";
  }
  return access((folder / ".").c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

void check_folder(const std::string& target, const AttendInputs& in) {
  const std::string name = target.substr(0, target.find_last_not_of('/') + 1);
  if (in.attention.q.type == bf16 || in.attention.bias.type == bf16) {
    throw UsageError(
        fmt::format("--out = {}: .npy has no bf16; name a .safetensors file, for "
                    "example --out {}.safetensors",
                    target, name));
  }
  std::error_code ignored;
  const auto status = std::filesystem::status(target, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status)) {
    throw UsageError(
        fmt::format("--out = {}: is a file; name a directory or NAME.safetensors", target));
  }
  const std::string fault = folder_fault(name.empty() ? "/" : name);
  if (!fault.empty()) throw UsageError(fmt::format("--out = {}: {}", target, fault));
}

// A file that is read must not be lost by the same call.
void refuse_inputs(const std::string& path, const AttendArguments& arguments) {
  std::vector<std::string> inputs = arguments.files;
  for (const auto& [name, file] : arguments.extra_files) inputs.push_back(file);
  for (const std::string& input : inputs) {
    if (!is_same_file(path, input)) continue;
    throw UsageError(
        fmt::format("--out = {}: {} would replace {}, which is read; name another file",
                    arguments.out, path, input));
  }
}

void write_folder(const std::string& target,
                  const std::vector<std::pair<std::string, Tensor>>& results) {
  std::error_code failure;
  std::filesystem::create_directories(target, failure);
  if (failure) throw UsageError(fmt::format("--out = {}: {}", target, failure.message()));
  for (const auto& [name, tensor] : results) write_npy(file_in(target, name), tensor);
}

}  // namespace

void check_target(const AttendArguments& arguments, const AttendInputs& in) {
  const std::string& target = arguments.out;
  if (target.empty()) return;
  std::vector<std::string> paths;
  if (is_one_file(target)) {
    paths.push_back(target);
  } else {
    check_folder(target, in);
    if (!std::filesystem::exists(target)) return;
    for (const std::string& name : result_names(in, arguments.backward)) {
      paths.push_back(file_in(target, name));
    }
  }
  for (const std::string& path : paths) {
    const std::string fault = write_fault(path);
    if (!fault.empty()) {
      throw UsageError(fmt::format("--out = {}: {} cannot be written: {}", target, path, fault));
    }
    refuse_inputs(path, arguments);
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
