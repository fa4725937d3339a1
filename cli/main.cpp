// The tool's entry: every failure ends as one line on stderr and an exit status.
#include <exception>
#include <new>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "output/output.hpp"

namespace regard::cli {

namespace {

int run(int argc, char** argv) {
  try {
    return run_command_line(argc, argv);
  } catch (const UsageError& error) {
    output::error("{}", error.what());
    return 2;
  } catch (const Error& error) {
    output::error("{}", error.what());
    const bool not_by_the_user =
        error.code() == Code::internal || error.code() == Code::device_failure;
    return not_by_the_user ? 1 : 2;
  } catch (const std::bad_alloc&) {
    output::error("memory: not enough for these sizes; try a smaller problem");
    return 2;
  } catch (const std::exception& error) {
    output::error("{}", error.what());
    return 1;
  }
}

}  // namespace

}  // namespace regard::cli

int main(int argc, char** argv) {
  regard::cli::output::guard_standard_streams();
  return regard::cli::output::finish(regard::cli::run(argc, argv));
}
