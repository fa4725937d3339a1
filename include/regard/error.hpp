/// \file
/// Error: what the library throws when it refuses or fails; it names the argument and its value.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)

namespace regard {

/// Why the library refused or failed.
enum class Code {
  invalid_argument,  ///< an argument breaks a rule of docs/semantics.md
  unsupported,       ///< well formed, but the chosen backend cannot do it
  unavailable,       ///< the backend or device is not on this machine
  out_of_memory,     ///< memory could not be allocated
  internal,          ///< a bug of this library
  /// The GPU's driver, or the caller's distributed::Collectives, reported a failure; its own words
  /// are in the text.
  device_failure,
};

/// What every function of the library throws where it refuses or fails. Those that neither compute
/// nor plan a call can also throw std::bad_alloc.
class Error : public std::runtime_error {
 public:
  /// what() reads "argument = value: reason".
  Error(Code error_code, std::string argument_name, std::string argument_value,
        const std::string& reason)
      : std::runtime_error(argument_name + " = " + argument_value + ": " + reason),
        code_(error_code),
        argument_(std::move(argument_name)),
        value_(std::move(argument_value)) {}

  /// Why.
  Code code() const noexcept { return code_; }
  /// The argument that is wrong, or what failed.
  const std::string& argument() const noexcept { return argument_; }
  /// Its value, as text.
  const std::string& value() const noexcept { return value_; }

 private:
  Code code_;
  std::string argument_;
  std::string value_;
};

}  // namespace regard

#pragma GCC visibility pop
