// All that the tool prints: results on stdout, the rest on stderr, without the characters that
// speak to a terminal. No failure of either stream throws; finish() turns a failure of stdout into
// the exit status.
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace regard::cli::output {

// Opens /dev/null as each of stdin, stdout and stderr that is closed, so that no file gets their
// numbers. Writing to such a stream still fails. main() calls this first.
void guard_standard_streams();

// --quiet: leaves out notes and progress, but not errors.
void be_quiet();
bool is_quiet();

// After this call, results go to stderr, or nowhere if quiet, because stdout carries the data of
// --out.
void give_stdout_to_data();

void put(std::string_view result);
void put_note(std::string_view text);
void put_error(std::string_view text);
void flush();

// Writes progress to stderr as it is, with its control characters.
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

// Flushes stdout and returns status. If a result could not be written, says so, and returns 1
// instead of 0.
int finish(int status);

}  // namespace regard::cli::output
