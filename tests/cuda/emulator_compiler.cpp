// libnvrtc for the emulated GPU: the calls of src/cuda/nvrtc.cpp, over the C++ compiler. Kernels
// are made of the texts that are given, all but ptx.cuh.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "plan/cuda/chip.hpp"
#include "tests/cuda/emulator_build.hpp"
#include "tests/cuda/emulator_image.hpp"

using regard::known_chips;
using namespace regard::emulated;
namespace files = std::filesystem;

namespace {

struct Program {
  std::string unit;
  std::vector<std::pair<std::string, std::string>> headers;
  std::string log;
  std::string image;
};

constexpr int kInvalidInput = 3, kCompilation = 6;

// A folder of a compilation's own.
class Scratch {
 public:
  Scratch() {
    std::string name = (files::temp_directory_path() / "regard-emulated-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    path = name;
  }
  ~Scratch() {
    std::error_code ignored;
    files::remove_all(path, ignored);
  }
  files::path path;
};

int copy_text(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return 0;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EXPORTED int nvrtcGetNumSupportedArchs(int* count) {
  *count = int(known_chips().size());
  return 0;
}
EXPORTED int nvrtcGetSupportedArchs(int* list) {
  for (const regard::Chip& chip : known_chips()) *list++ = chip.capability();
  return 0;
}

EXPORTED int nvrtcCreateProgram(Program** program, const char* text, const char*, int headers,
                                const char* const* texts, const char* const* names) {
  *program = new Program{.unit = text, .headers = {}, .log = {}, .image = {}};
  for (int i = 0; i < headers; ++i) (*program)->headers.emplace_back(names[i], texts[i]);
  return 0;
}
EXPORTED int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

EXPORTED int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  try {
    const bool has_target = std::any_of(options, options + count, [](const char* option) {
      return std::string(option).rfind("--gpu-architecture=", 0) == 0;
    });
    if (!has_target) return kInvalidInput;
    const Scratch scratch;
    for (const auto& [name, text] : program->headers) {
      if (name == "cuda/kernels/ptx.cuh") continue;
      files::create_directories((scratch.path / name).parent_path());
      std::ofstream(scratch.path / name) << text;
    }
    const files::path library = scratch.path / "kernel.so";
    build_kernel(program->unit, compiler_command({scratch.path}), library);
    const std::string bytes = content(library);
    const ImageHead head{.size = bytes.size()};
    program->image.assign(reinterpret_cast<const char*>(&head), sizeof head);
    program->image += bytes;
    program->log =
        "ptxas info    : Used 32 registers, used 1 barriers\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
    return 0;
  } catch (const std::exception& error) {
    program->log = error.what();
    return kCompilation;
  }
}

EXPORTED int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
EXPORTED int nvrtcGetProgramLog(Program* program, char* to) {
  return copy_text(program->log + '\0', to);
}
EXPORTED int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = program->image.size();
  return 0;
}
EXPORTED int nvrtcGetCUBIN(Program* program, char* to) { return copy_text(program->image, to); }
EXPORTED int nvrtcGetPTXSize(Program* program, std::size_t* size) {
  return nvrtcGetCUBINSize(program, size);
}
EXPORTED int nvrtcGetPTX(Program* program, char* to) { return nvrtcGetCUBIN(program, to); }
EXPORTED const char* nvrtcGetErrorString(int error) {
  return error == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}
