// Which file and function each kernel is, and which headers a file needs.
#include "cuda/kernel_text.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

#include "cuda/environment.hpp"
#include "cuda/trust.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/kernel/wgmma_backward_layout.h"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

struct KernelSource {
  Kernel kernel;
  Family family;
  const char* file;
  const char* function;
  bool key_warps = false;
};

constexpr KernelSource kSources[] = {
    {Kernel::forward, Family::wgmma, "forward_wgmma.cuh", "forward_wgmma"},
    {Kernel::backward, Family::wgmma, "backward_wgmma.cuh", "backward_wgmma"},
    {Kernel::forward, Family::mma, "forward_mma.cuh", "forward_mma"},
    {Kernel::forward, Family::mma, "forward_decode.cuh", "forward_decode", true},
    {Kernel::backward, Family::mma, "backward_mma.cuh", "backward_mma"},
    {Kernel::forward, Family::simt, "forward_simt.cuh", "forward_simt"},
    {Kernel::key_gradient, Family::simt, "gradients_simt.cuh", "key_gradient_simt"},
    {Kernel::query_gradient, Family::simt, "gradients_simt.cuh", "query_gradient_simt"},
    {Kernel::bias_gradient, Family::simt, "gradients_simt.cuh", "bias_gradient_simt"},
    {Kernel::combine, Family::simt, "combine.cuh", "combine"},
    {Kernel::delta, Family::simt, "delta.cuh", "delta"},
    {Kernel::finish, Family::simt, "finish.cuh", "finish"},
    {Kernel::sink_gradient, Family::simt, "sink_gradient.cuh", "sink_gradient"},
    {Kernel::split_f32, Family::simt, "split_f32.cuh", "split_f32"},
    {Kernel::copy_inputs, Family::simt, "copy_inputs.cuh", "copy_inputs"},
    {Kernel::combine_dkv, Family::simt, "combine_dkv.cuh", "combine_dkv"},
    {Kernel::row_map, Family::simt, "tile_map.cuh", "tile_map"},
    {Kernel::key_map, Family::simt, "tile_map.cuh", "tile_map"},
    {Kernel::write_rows, Family::simt, "write_rows.cuh", "write_rows"},
};

constexpr KernelSource kWideBackward = {Kernel::backward, Family::wgmma, "backward_wide.cuh",
                                        "backward_wide"};

const KernelSource& source_of(const KernelConfig& c) {
  if (c.kernel == Kernel::backward && c.family == Family::wgmma && is_wide(c)) return kWideBackward;
  const auto* const found = std::find_if(std::begin(kSources), std::end(kSources), [&](auto& s) {
    return s.kernel == c.kernel && s.family == c.family && s.key_warps == (c.tiling.key_warps > 1);
  });
  if (found == std::end(kSources)) {
    refuse("kernel", to_text(c), "there is no such kernel", Code::internal);
  }
  return *found;
}

bool embedded_text(const std::string& name, std::string& text) {
  for (int i = 0; i < kEmbeddedTextCount; ++i) {
    if (name != kEmbeddedTexts[i].name) continue;
    text = kEmbeddedTexts[i].text;
    return true;
  }
  return false;
}

// A folder with the texts, as in the source tree: with src/ and include/ in it, or with their
// contents. A folder that others may write to is an Error, because the user did not ask for the
// embedded text.
bool text_in_folder(const std::string& folder, const std::string& name, std::string& text) {
  for (const char* below : {"/", "/src/", "/include/"}) {
    const TrustedPath found = trusted_path(folder + below + name);
    if (!found.exists) continue;
    if (!found.fault.empty()) {
      refuse("REGARD_KERNEL_DIR", folder, folder + below + name + " is not used: it " + found.fault,
             Code::unavailable);
    }
    std::ifstream file(found.path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    text = all.str();
    return true;
  }
  return false;
}

// A name that leads nowhere is an Error too, for the same reason. A folder may lack single texts.
void require_folder(const std::string& folder) {
  std::error_code ignored;
  if (std::filesystem::is_directory(folder, ignored)) return;
  refuse("REGARD_KERNEL_DIR", folder, "there is no such folder", Code::unavailable);
}

std::string text_named(const std::string& name) {
  std::string text;
  const std::string folder = kernel_folder();
  if (!folder.empty()) require_folder(folder);
  if (!folder.empty() && text_in_folder(folder, name, text)) return text;
  if (embedded_text(name, text)) return text;
  refuse("kernel", name, "the library holds no such text", Code::internal);
}

// The names in its lines #include "name".
std::vector<std::string> includes_of(const std::string& text) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<std::string> names;
  for (std::size_t at = text.find(kInclude); at != std::string::npos;
       at = text.find(kInclude, at + 1)) {
    if (at > 0 && text[at - 1] != '\n') continue;
    const std::size_t first = at + kInclude.size();
    names.push_back(text.substr(first, text.find('"', first) - first));
  }
  return names;
}

void add_headers(const std::string& text, std::vector<SourceText>& headers) {
  for (const std::string& name : includes_of(text)) {
    const auto known = [&](const SourceText& header) { return header.name == name; };
    if (std::any_of(headers.begin(), headers.end(), known)) continue;
    headers.push_back({name, text_named(name)});
    add_headers(std::string(headers.back().text), headers);
  }
}

// Kernels are launched with programmatic serialization (backend.cpp): one may begin when the blocks
// of the kernel before it end. Every thread waits here, before it touches global memory, until that
// kernel has finished, so that a chain of Regard's kernels behaves as if launches did not overlap.
// One caveat: if the caller's preceding kernel was launched this way and never waits, work that was
// queued before it may still be running. Work that is launched otherwise (copies, memset, free, a
// caller's kernels) begins when everything before it has finished. Kernel parameters, tensor maps
// among them, belong to the launch and may be read earlier. No kernel releases its dependents
// earlier (griddepcontrol.launch_dependents): their blocks would take the places where blocks of
// the running kernel still have to begin, and would themselves be spread unevenly.
constexpr const char* kBeginning = "  regard::griddepcontrol_wait();\n";

}  // namespace

KernelUnit kernel_unit(const KernelConfig& c) {
  const KernelSource& source = source_of(c);
  const bool has_maps = c.family == Family::wgmma;
  const std::string maps = c.kernel == Kernel::backward ? "BackwardMaps" : "ForwardMaps";
  KernelUnit unit;
  unit.text =
      "#define REGARD_LEVEL " + std::to_string(c.level) + "\n" +
      (cluster_size(c) > 1 ? "#define REGARD_CLUSTER " + std::to_string(cluster_size(c)) + "\n"
                           : "") +
      "#include \"cuda/kernels/" + source.file +
      "\"\n"
      "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700\n"
      "#define REGARD_IN_PLACE  // older chips copy the parameters\n"
      "#else\n"
      "#define REGARD_IN_PLACE __grid_constant__\n"
      "#endif\n"
      "extern \"C\" __global__ void " +
      (cluster_size(c) > 1 ? "__cluster_dims__(REGARD_CLUSTER, 1, 1) " : "") +
      "__launch_bounds__(" + std::to_string(c.tiling.warps * 32) + ", " +
      std::to_string(c.tiling.min_blocks) + ") " + kKernelSymbol +
      "(\n"
      "    const REGARD_IN_PLACE regard::KernelParams params" +
      (has_maps ? ",\n    const REGARD_IN_PLACE regard::" + maps + " maps" : "") + ") {\n" +
      kBeginning + "  regard::" + source.function + "<" + to_text(c) +
      (has_maps ? ">(params, maps);\n" : ">(params);\n") + "}\n";
  add_headers(unit.text, unit.headers);
  return unit;
}

}  // namespace regard::cuda_backend
