// A libnvrtc.so.13 that compiles nothing: the image is the unit's own text, the log what ptxas
// would say. Counts what it is asked to do in the file that REGARD_FAKE_COMPILATIONS names, one
// byte each, so that several processes can share the count.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

struct Program {
  std::string unit;
  std::string log;
};

namespace {

constexpr int kOk = 0, kCompilationFailed = 6;

void count_one() {
  const char* const path = std::getenv("REGARD_FAKE_COMPILATIONS");
  if (!path) return;
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0) return;
  if (write(file, "+", 1) != 1) std::abort();
  close(file);
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 9, kOk; }
FAKE int nvrtcGetNumSupportedArchs(int* count) { return *count = 5, kOk; }
FAKE int nvrtcGetSupportedArchs(int* list) {
  const int known[] = {75, 80, 86, 87, 90};
  return std::memcpy(list, known, sizeof known), kOk;
}
FAKE int nvrtcCreateProgram(Program** program, const char* text, const char*, int,
                            const char* const*, const char* const*) {
  return *program = new Program{text, ""}, kOk;
}
FAKE int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return *program = nullptr, kOk;
}
FAKE int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  count_one();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int i = 0; i < count; ++i) program->unit += std::string("\n// ") + options[i];
  if (std::getenv("REGARD_FAKE_COMPILER_FAILS")) {
    program->log = "the fake compiler was told to fail\n";
    return kCompilationFailed;
  }
  program->log =
      "ptxas info    : Compiling entry function 'regard_kernel' for 'sm_90'\n"
      "    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem\n";
  if (const char* note = std::getenv("REGARD_FAKE_COMPILER_NOTE")) program->log += note;
  return kOk;
}
FAKE int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  return *size = program->log.size() + 1, kOk;
}
FAKE int nvrtcGetProgramLog(Program* program, char* log) {
  return std::strcpy(log, program->log.c_str()), kOk;
}
FAKE int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  return *size = program->unit.size() + 1, kOk;
}
FAKE int nvrtcGetCUBIN(Program* program, char* image) {
  return std::strcpy(image, program->unit.c_str()), kOk;
}
FAKE int nvrtcGetPTXSize(Program* program, std::size_t* size) {
  return nvrtcGetCUBINSize(program, size);
}
FAKE int nvrtcGetPTX(Program* program, char* image) { return nvrtcGetCUBIN(program, image); }
FAKE const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
