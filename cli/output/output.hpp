// All that the tool prints: results on stdout, the rest on stderr. No failure of either stream
// throws; finish() turns a failure of stdout into the exit status.
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace regard::cli::output {

// Puts /dev/null in place of a closed stdin, stdout or stderr, so that no file that is opened
// later gets its number; writing there still fails. The first call of main().
void guard_standard_streams();

// --quiet: notes and progress are left out; errors remain.
void be_quiet();
bool is_quiet();

// From here on results go to stderr, or nowhere if quiet: stdout carries the data of --out.
void give_stdout_to_data();

void put(std::string_view result);
void put_note(std::string_view text);
void put_error(std::string_view text);
void flush();

// A live line of progress, raw on stderr.
void put_progress(std::string_view text);

template <class... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  put(fmt::format(format, std::forward<Values>(values)...));
}

// "note: TEXT" on a line of stderr.
template <class... Values>
void note(fmt::format_string<Values...> format, Values&&... values) {
  put_note(fmt::format(format, std::forward<Values>(values)...));
}

// "regard: TEXT" on a line of stderr, after the results so far.
template <class... Values>
void error(fmt::format_string<Values...> format, Values&&... values) {
  put_error(fmt::format(format, std::forward<Values>(values)...));
}

// Flushes stdout. Returns status; or, if a result could not be written, says so and returns 1 in
// place of 0.
int finish(int status);

}  // namespace regard::cli::output
