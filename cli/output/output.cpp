// C streams, because they report failures by value.
#include "output/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace regard::cli::output {

namespace {

bool quiet = false;
bool data_on_stdout = false;
int failure = 0;  // errno of the first write to stdout that failed

void keep_failure(bool failed) {
  if (failed && failure == 0) failure = errno;
}

// Without the characters that speak to a terminal ('?' in their place), because names come from
// anybody. In UTF-8, those from U+0080 to U+009F are two bytes.
std::string without_controls(std::string_view text) {
  std::string kept;
  for (std::size_t n = 0; n < text.size(); ++n) {
    const auto byte = static_cast<unsigned char>(text[n]);
    const auto next = n + 1 < text.size() ? static_cast<unsigned char>(text[n + 1]) : 0;
    const bool two = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    const bool one = (byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7f;
    kept += one || two ? '?' : text[n];
    n += two;
  }
  return kept;
}

// A whole line in one call, so that lines of several threads do not mix.
void put_line(const char* prefix, std::string_view text) {
  std::string line = prefix;
  line += without_controls(text);
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void guard_standard_streams() {
  for (int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(number, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is this one. The opposite direction, so that using it is an error.
    static_cast<void>(open("/dev/null", number == STDIN_FILENO ? O_WRONLY : O_RDONLY));
  }
}

void be_quiet() { quiet = true; }
bool is_quiet() { return quiet; }

void give_stdout_to_data() {
  flush();
  data_on_stdout = true;
}

void put(std::string_view text) {
  const std::string result = without_controls(text);
  if (data_on_stdout) {
    put_progress(result);
    return;
  }
  keep_failure(std::fwrite(result.data(), 1, result.size(), stdout) != result.size());
}

void put_note(std::string_view text) {
  if (!quiet) put_line("note: ", text);
}

void put_error(std::string_view text) {
  flush();
  put_line("regard: ", text);
}

void flush() { keep_failure(std::fflush(stdout) != 0); }

void put_progress(std::string_view text) {
  if (!quiet) std::fwrite(text.data(), 1, text.size(), stderr);
}

int finish(int status) {
  flush();
  if (failure == 0) return status;
  put_line("regard: ", std::string("stdout: cannot be written: ") + std::strerror(failure));
  return status == 0 ? 1 : status;
}

}  // namespace regard::cli::output
