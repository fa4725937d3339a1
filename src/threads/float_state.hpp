// The floating-point state that results are computed under, whatever the thread's own is.
#pragma once

#if !defined(__SSE2__)
#include <cfenv>
#endif

namespace regard {

// Within its scope the thread rounds to nearest, keeps subnormals and traps nothing; afterwards the
// thread has its own state back, exception flags included. Otherwise a caller's rounding mode,
// flush-to-zero or unmasked exceptions would change results.
class DefaultFloatState {
 public:
  DefaultFloatState() noexcept { save(); }
  ~DefaultFloatState() { restore(); }
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nothing else set

  void save() noexcept {
    own_ = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(kDefault);
  }
  void restore() noexcept { __builtin_ia32_ldmxcsr(own_); }

  unsigned own_ = kDefault;
#else
  void save() noexcept {
    std::fegetenv(&own_);
    std::fesetenv(FE_DFL_ENV);
  }
  void restore() noexcept { std::fesetenv(&own_); }

  std::fenv_t own_;
#endif
};

}  // namespace regard
