// The manual page: the help of all commands, and chapters that the help has no room for.
#include <fmt/format.h>

#include "command_line/help.hpp"
#include "command_line/parse.hpp"
#include "regard/regard.hpp"

namespace regard::cli {

namespace {

// Text that roff prints as it is.
std::string plain(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
  }
  if (result.starts_with('.') || result.starts_with('\'')) result.insert(0, "\\&");
  return result;
}

std::string option_text(const OptionHelp& option) {
  std::string names;
  for (const std::string& name : option.names) {
    names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", plain(name));
  }
  if (option.value_is_optional) {
    names += fmt::format("[=\\fI{}\\fR]", plain(option.value));
  } else if (!option.value.empty()) {
    names += fmt::format(" \\fI{}\\fR", plain(option.value));
  }
  return fmt::format(".TP\n{}\n{}\n", names, plain(option.text));
}

// Lines that begin with "Example: ", and indented lines below them, are commands.
std::string footer_text(const std::string& footer) {
  std::string examples, words;
  for (std::string line : split(footer, '\n')) {
    const bool first = line.starts_with("Example: ");
    if (first) line.erase(0, 9);
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == std::string::npos) continue;
    (first || begin > 0 ? examples : words) += plain(line.substr(begin)) + "\n";
  }
  std::string text;
  if (!words.empty()) text += ".PP\n" + words;
  if (!examples.empty()) text += ".PP\nExamples:\n.PP\n.RS 4\n.nf\n" + examples + ".fi\n.RE\n";
  return text;
}

std::string command_text(const std::string& before, const CommandHelp& command) {
  const std::string name = before + " " + command.name;
  std::string text = fmt::format(".SS {}\n{}.\n", plain(name), plain(command.text));
  for (const OptionHelp& option : command.options) text += option_text(option);
  text += footer_text(command.footer);
  for (const CommandHelp& sub : command.commands) text += command_text(name, sub);
  return text;
}

constexpr const char* kRest = R"(.SH OUTPUT
Results go to stdout; notes, progress and errors go to stderr, and
.B \-\-quiet
leaves out all of it except errors.
.PP
A file that
.B \-\-out
names appears whole or not at all, also where a signal ends the tool meanwhile.
Symbolic links are followed.
A FIFO or a device is written through, as one .safetensors stream.
Where
.B \-\-out
is stdout itself (/dev/stdout), the tables go to stderr.
.SH JSON
.B \-\-json
prints one object on one line.
Keys stay; more may be added.
Sizes are bytes, and a number that is not finite is null.
.TP
\fBregard info\fR
version, cpu, threads, isa (a list), caches (l1, l2, l3),
gpu (devices, each with name, chip, multiprocessors, memory, l2,
shared_per_block; has_driver, driver, has_compiler, compiler, skipped,
cache, cache_fault),
backends (each with name, available, note).
.TP
\fBregard explain\fR
supported, backend, kernel, text, workspace, pairs, flops.
.TP
\fBregard attend\fR
q, k, v (each with type and sizes);
passes (each with pass, backend, kernel, ms, gflops, flops, workspace; with
.B \-\-explain
also text); with
.B \-\-compare
comparison: errors (each with output, norm, worst_row, unfused_norm,
unfused_worst_row), unfused_fits, unfused_forward_ms, unfused_both_ms,
unfused_bytes; with
.B \-\-out
wrote: path, tensors.
.TP
\fBregard check\fR
backend, seed, passed, failed, left_out,
failures (each with problem, description, complaints, repeat),
worst (each with output, problems, ratio, problem).
.TP
\fBregard cache list\fR
folder, kernels (each with chip, compiler, config, file, registers,
spill_bytes, stack_bytes, shared_bytes, bytes, serialized, fault),
fault.
.SH EXIT STATUS
0: fine.
1: a wrong result, a failed check, or results that stdout did not take.
2: bad usage or input.
A signal ends the tool as it ends other programs.
.SH ENVIRONMENT
.TP
\fBREGARD_BACKEND\fR
The backend where
.B \-\-backend
does not say.
.TP
\fBREGARD_CACHE_DIR\fR
The folder of compiled GPU kernels.
)";

}  // namespace

std::string manual_page(const CommandHelp& tool) {
  std::string text = fmt::format(
      ".TH REGARD 1 \"\" \"regard {}\" \"User Commands\"\n"
      ".SH NAME\nregard \\- {}\n"
      ".SH SYNOPSIS\n.B regard\n\\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n"
      ".SH OPTIONS\n",
      version(), plain(tool.text));
  for (const OptionHelp& option : tool.options) text += option_text(option);
  text += ".SH COMMANDS\n";
  for (const CommandHelp& command : tool.commands) text += command_text(tool.name, command);
  return text + kRest;
}

}  // namespace regard::cli
