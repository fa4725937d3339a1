// Completion scripts for bash, zsh and fish, made from the help.
#include <fmt/format.h>

#include "command_line/help.hpp"

namespace regard::cli {

namespace {

using Words = std::vector<std::string>;

std::string joined(const Words& words) { return fmt::format("{}", fmt::join(words, " ")); }

// Inside '...' of any of the three shells.
std::string quoted(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result;
}

// Everything that may stand where an option, a subcommand or a named argument may.
Words words_of(const CommandHelp& command) {
  Words words;
  for (const CommandHelp& sub : command.commands) words.push_back(sub.name);
  for (const OptionHelp& option : command.options) {
    const Words& names = option.positional ? option.choices : option.names;
    words.insert(words.end(), names.begin(), names.end());
    if (!option.value_is_optional) continue;
    for (const std::string& choice : option.choices) {
      words.push_back(option.names.back() + "=" + choice);
    }
  }
  return words;
}

// ------------------------------------------------------------------------------------------- bash

// What follows an option: its choices, files (which bash completes itself), or nothing.
std::string bash_values(const CommandHelp& command) {
  std::string text;
  Words files, others;
  for (const OptionHelp& option : command.options) {
    if (option.positional || option.value.empty() || option.value_is_optional) continue;
    if (!option.choices.empty()) {
      text += fmt::format("        {}) words='{}' ;;\n", fmt::join(option.names, "|"),
                          quoted(joined(option.choices)));
    } else {
      Words& list = option.is_file ? files : others;
      list.insert(list.end(), option.names.begin(), option.names.end());
    }
  }
  if (!files.empty()) text += fmt::format("        {}) return ;;\n", fmt::join(files, "|"));
  if (!others.empty()) {
    text += fmt::format("        {}) compopt +o default; return ;;\n", fmt::join(others, "|"));
  }
  return text;
}

std::string bash_script(const CommandHelp& tool) {
  std::string cases;
  for (const CommandHelp& command : tool.commands) {
    cases +=
        fmt::format("    {})\n      words='{}'\n", command.name, quoted(joined(words_of(command))));
    const std::string values = bash_values(command);
    if (!values.empty()) cases += "      case $previous in\n" + values + "      esac\n";
    cases += "      ;;\n";
  }
  // readline takes what follows the last : or = for the word, so that only this is handed back.
  return fmt::format(R"(# bash completion for {0}, made by `{0} completion bash`.
_{0}() {{
  local line=${{COMP_LINE:0:COMP_POINT}} typed words
  local current=${{line##*[[:space:]]}}
  read -ra typed <<< "${{line%"$current"}}"
  local previous=${{typed[-1]}} command word
  for word in "${{typed[@]:1}}"; do
    [[ $word == -* ]] || {{ command=$word; break; }}
  done
  COMPREPLY=()
  case $command in
{1}    *) words='{2}' ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  COMPREPLY=("${{COMPREPLY[@]#"${{current%"${{current##*[:=]}}"}}"}}")
}}
complete -o default -F _{0} {0}
)",
                     tool.name, cases, quoted(joined(words_of(tool))));
}

// -------------------------------------------------------------------------------------------- zsh

// In [...] and in messages of _arguments, where brackets and colons have a meaning.
std::string zsh_text(const std::string& text) {
  std::string result;
  for (const char c : quoted(text)) {
    if (c == '[' || c == ']' || c == ':') result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_action(const OptionHelp& option) {
  if (!option.choices.empty()) {
    return "(" + zsh_text(joined(option.choices)) + ")";
  }
  return option.is_file || option.positional ? "_files" : " ";
}

std::string zsh_spec(const OptionHelp& option) {
  std::string text;
  if (option.positional) {
    return fmt::format(" \\\n        '*:{}:{}'", option.names[0], zsh_action(option));
  }
  for (const std::string& name : option.names) {
    const char* const joint = option.value_is_optional ? "=-" : "";
    text += fmt::format(" \\\n        '{}{}[{}]", name, joint, zsh_text(option.text));
    if (!option.value.empty()) {
      text += fmt::format("{}:{}:{}", option.value_is_optional ? ":" : "", zsh_text(option.value),
                          zsh_action(option));
    }
    text += "'";
  }
  return text;
}

std::string zsh_specs(const CommandHelp& command) {
  std::string text;
  for (const OptionHelp& option : command.options) text += zsh_spec(option);
  if (command.commands.empty()) return text;
  Words names;
  for (const CommandHelp& sub : command.commands) names.push_back(sub.name);
  return text + fmt::format(" \\\n        '1:command:({})'", joined(names));
}

std::string zsh_script(const CommandHelp& tool) {
  std::string commands, cases, own;
  for (const CommandHelp& command : tool.commands) {
    commands += fmt::format("    '{}:{}'\n", command.name, zsh_text(command.text));
    cases +=
        fmt::format("    {})\n      _arguments{}\n      ;;\n", command.name, zsh_specs(command));
  }
  for (const OptionHelp& option : tool.options) own += zsh_spec(option);
  return fmt::format(R"(#compdef {0}
# zsh completion for {0}, made by `{0} completion zsh`.
_{0}() {{
  local state line
  local -a commands=(
{1}  )
  _arguments -C{3} \
        '1:command:->command' '*::argument:->argument'
  [[ $state == command ]] && _describe command commands
  [[ $state == argument ]] || return
  case $words[1] in
{2}  esac
}}
if [[ $funcstack[1] == _{0} ]]; then
  _{0} "$@"
else
  compdef _{0} {0}
fi
)",
                     tool.name, commands, cases, own);
}

// ------------------------------------------------------------------------------------------- fish

std::string fish_option(const std::string& tool, const std::string& when,
                        const OptionHelp& option) {
  std::string text = fmt::format("complete -c {} -n '{}'", tool, when);
  for (const std::string& name : option.names) {
    if (option.positional) break;
    text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  if (option.positional && option.choices.empty()) return text + " -F\n";
  if (!option.value.empty() && !option.value_is_optional && !option.positional) {
    text += option.is_file ? " -r -F" : " -x";
  }
  if (!option.choices.empty() && !option.value_is_optional) {
    text += " -a '" + quoted(joined(option.choices)) + "'";
  }
  return text + " -d '" + quoted(option.text) + "'\n";
}

std::string fish_script(const CommandHelp& tool) {
  std::string text = fmt::format(
      "# fish completion for {0}, made by `{0} completion fish`.\ncomplete -c {0} -f\n", tool.name);
  for (const OptionHelp& option : tool.options) {
    text += fish_option(tool.name, "__fish_use_subcommand", option);
  }
  for (const CommandHelp& command : tool.commands) {
    text += fmt::format("complete -c {} -n __fish_use_subcommand -a {} -d '{}'\n", tool.name,
                        command.name, quoted(command.text));
    const std::string when = "__fish_seen_subcommand_from " + command.name;
    for (const CommandHelp& sub : command.commands) {
      text += fmt::format("complete -c {} -n '{}' -a {} -d '{}'\n", tool.name, when, sub.name,
                          quoted(sub.text));
    }
    for (const OptionHelp& option : command.options) text += fish_option(tool.name, when, option);
  }
  return text;
}

}  // namespace

std::string completion_script(const CommandHelp& tool, const std::string& shell) {
  if (shell == "bash") return bash_script(tool);
  return shell == "zsh" ? zsh_script(tool) : fish_script(tool);
}

}  // namespace regard::cli
