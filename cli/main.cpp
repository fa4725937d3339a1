// The tool's entry: every failure ends as one line on stderr and an exit status.
#include <fmt/core.h>

#include <exception>
#include <new>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"

int main(int argc, char** argv) {
  try {
    return regard::cli::run_command_line(argc, argv);
  } catch (const regard::cli::UsageError& error) {
    fmt::print(stderr, "regard: {}\n", error.what());
    return 2;
  } catch (const regard::Error& error) {
    fmt::print(stderr, "regard: {}\n", error.what());
    const bool not_by_the_user =
        error.code() == regard::Code::internal || error.code() == regard::Code::device_failure;
    return not_by_the_user ? 1 : 2;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "regard: memory: not enough for these sizes; try a smaller problem\n");
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "regard: {}\n", error.what());
    return 1;
  }
}
