// The help of commands and options as text, from which completions and the manual page are made.
#pragma once

#include <string>
#include <vector>

namespace regard::cli {

struct OptionHelp {
  std::vector<std::string> names;    // "-h", "--help"; a positional argument has one without dashes
  std::string value;                 // "SHAPE", "bhsd|bshd"; empty: a flag
  std::vector<std::string> choices;  // possible values, if they can be listed
  std::string text;
  bool positional = false;
  bool value_is_optional = false;  // --causal, --causal=top-left
  bool is_file = false;
};

struct CommandHelp {
  std::string name, text, footer;
  std::vector<OptionHelp> options;
  std::vector<CommandHelp> commands;
};

// A script for "bash", "zsh" or "fish".
std::string completion_script(const CommandHelp& tool, const std::string& shell);

// The manual page of section 1, in roff.
std::string manual_page(const CommandHelp& tool);

}  // namespace regard::cli
