// Compiles a kernel, and reads from the compiler's log what it takes of the chip.
#include "cuda/jit.hpp"

#include <cstdlib>
#include <ctime>

#include "cuda/environment.hpp"
#include "plan/cuda/config_text.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// The number before (or right after) the last occurrence of a phrase: ptxas prints the kernel's
// lines after those of the functions that it calls.
int number_before(const std::string& log, const char* phrase) {
  const std::size_t at = log.rfind(phrase);
  if (at == std::string::npos) return 0;
  std::size_t first = at;
  while (first > 0 && log[first - 1] >= '0' && log[first - 1] <= '9') --first;
  return std::atoi(log.substr(first, at - first).c_str());
}

// This thread's processor time, so that other work on the machine does not count; NVRTC starts no
// threads.
double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace

std::string printed(const KernelConfig& c) { return to_text(c); }

KernelResources resources_in(const std::string& log) {
  return {.registers = number_before(log, " registers"),
          .stack_bytes = number_before(log, " bytes stack frame"),
          .spill_bytes =
              number_before(log, " bytes spill stores") + number_before(log, " bytes spill loads"),
          .shared_bytes = number_before(log, " bytes smem"),
          .serialized = log.find("Potential Performance Loss") != std::string::npos};
}

KernelBinary compile_kernel(const KernelConfig& config, const KernelUnit& unit,
                            const Compiler& compiler, const std::string& architecture) {
  const double begin = thread_seconds();
  Compilation done = compiler.compile(unit.text, unit.headers, architecture);
  const double seconds = thread_seconds() - begin;
  if (!done.succeeded) {
    refuse("kernel", printed(config),
           compiler.name() + " failed for " + architecture + ":\n" + unit.text + done.log,
           Code::internal);
  }
  KernelBinary binary{
      .image = std::move(done.image), .resources = resources_in(done.log), .not_kept = ""};
  binary.resources.seconds = float(seconds);
  if (is_logging()) {
    const KernelResources& r = binary.resources;
    log_line("compiled in " + decimal(r.seconds, 3) + " s, " + std::to_string(r.registers) +
             " registers, " + std::to_string(r.spill_bytes) + " bytes spilled, " +
             (r.serialized ? "products serialized, " : "") + architecture + ", " + compiler.name() +
             ": " + printed(config));
  }
  return binary;
}

}  // namespace regard::cuda_backend
