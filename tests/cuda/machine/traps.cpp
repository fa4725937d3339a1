// Catches signals; leaves those of addresses to the sanitizer where there is one.
#include "traps.hpp"

#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace regard::emulated {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kSignals[] = {SIGFPE};
#else
constexpr int kSignals[] = {SIGFPE, SIGSEGV, SIGBUS};
#endif
constexpr int kCount = sizeof kSignals / sizeof *kSignals;

void (*handler)(const char*, const void*) = nullptr;
struct sigaction former[kCount];
stack_t former_stack;
alignas(16) unsigned char stack[64 << 10];

const void* instruction_of([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  const auto* const state = static_cast<const ucontext_t*>(context);
  return reinterpret_cast<const void*>(state->uc_mcontext.gregs[REG_RIP]);
#else
  return nullptr;
#endif
}

void catch_signal(int signal, siginfo_t* info, void* context) {
  static char what[100];
  if (signal == SIGFPE) {
    std::snprintf(what, sizeof what, "divides an integer by zero");
  } else {
    std::snprintf(what, sizeof what, "accesses address %p, which is nobody's", info->si_addr);
  }
  handler(what, instruction_of(context));
}

}  // namespace

Traps::Traps(void (*trapped)(const char*, const void*)) {
  handler = trapped;
  stack_t own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  sigaltstack(&own, &former_stack);
  struct sigaction action {};
  action.sa_sigaction = catch_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &former[i]);
}

Traps::~Traps() {
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &former[i], nullptr);
  sigaltstack(&former_stack, nullptr);
}

std::string lines_of(const void* instruction) {
  Dl_info info{};
  if (!instruction || !dladdr(instruction, &info) || !info.dli_fname) return "";
  const auto offset = reinterpret_cast<std::uintptr_t>(instruction) -
                      reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  char command[600];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' %#zx 2>/dev/null", info.dli_fname,
                static_cast<std::size_t>(offset));
  std::string lines;
  if (FILE* const said = popen(command, "r")) {
    char line[400];
    while (std::fgets(line, sizeof line, said)) lines += std::string("\n  at ") + line;
    pclose(said);
  }
  std::string text;
  for (const char c : lines) text += c == '\n' && text.ends_with('\n') ? "" : std::string(1, c);
  return text;
}

}  // namespace regard::emulated
