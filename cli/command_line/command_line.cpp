// Parses the command line and runs the command that it names.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <regard/cuda.hpp>

#include "command_line/grammar.hpp"
#include "command_line/help.hpp"
#include "command_line/parse.hpp"
#include "output/output.hpp"

namespace regard::cli {

namespace {

std::vector<std::string> choices_of(const std::string& value) {
  if (value.find('|') != std::string::npos) return split(value, '|');
  if (value == "DEVICE") return {"cpu", "cuda:0"};
  std::vector<std::string> names;
  if (value == "BACKEND") {
    for (const BackendInfo& backend : backends()) names.push_back(backend.name);
  }
  return names;
}

OptionHelp help_of(const CLI::Option& option) {
  OptionHelp help;
  help.positional = !option.nonpositional();
  for (const std::string& name : option.get_snames()) help.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) help.names.push_back("--" + name);
  if (help.positional) help.names.push_back(option.get_name(true));
  help.text = option.get_description();
  help.value = option.get_type_name();
  help.choices = choices_of(help.value);
  const bool is_flag = option.get_items_expected_min() == 0;
  help.value_is_optional = is_flag && !help.choices.empty();
  if (is_flag && help.choices.empty()) help.value.clear();
  help.is_file = help.value == "FILE" || help.value == "NPY";
  return help;
}

CommandHelp help_of(const CLI::App& app) {
  CommandHelp help{.name = app.get_name(),
                   .text = app.get_description(),
                   .footer = app.get_footer(),
                   .options = {},
                   .commands = {}};
  for (const CLI::Option* const option : app.get_options()) {
    help.options.push_back(help_of(*option));
  }
  for (const CLI::App* const command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) help.commands.push_back(help_of(*command));
  }
  return help;
}

// What is wrong with the first word that nothing takes, where a missing command or option hides it;
// else "".
std::string unknown_word(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  if (words.empty()) return {};
  const CLI::App* command = &app;
  std::string name = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands()[0];
    name += " " + command->get_name();
  }
  const std::string word = printable(words[0]);
  if (word.starts_with('-')) return fmt::format("{}: is no option of `{}`", word, name);
  std::string commands;
  for (const CommandHelp& one : help_of(*command).commands) {
    commands += (commands.empty() ? "" : ", ") + one.name;
  }
  if (commands.empty()) return fmt::format("{}: is not expected by `{}`", word, name);
  return fmt::format("{}: is no command of `{}`; its commands are {}", word, name, commands);
}

// --help and --version are fine, everything else is bad usage.
int report(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) {
    std::ostringstream text;
    app.exit(error, text, text);
    output::put(text.str());
    return 0;
  }
  const auto chosen = app.get_subcommands();
  const bool is_missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const std::string unknown = is_missing ? unknown_word(app) : std::string();
  output::error("{}\nSee: regard {}--help", unknown.empty() ? error.what() : unknown,
                chosen.empty() ? "" : chosen[0]->get_name() + " ");
  return 2;
}

int run_chosen(const CLI::App& app, const Arguments& arguments) {
  if (app.got_subcommand("info")) return run_info(arguments.info);
  if (app.got_subcommand("explain")) return run_explain(arguments.explain);
  if (app.got_subcommand("attend")) return run_attend(arguments.attend);
  if (app.got_subcommand("check")) return run_check(arguments.check);
  if (app.got_subcommand("cache")) return run_cache(arguments.cache);
  if (app.got_subcommand("prebuild")) return run_prebuild(arguments.prebuild);
  const CommandHelp help = help_of(app);
  output::put(app.got_subcommand("manual") ? manual_page(help)
                                           : completion_script(help, arguments.completion.shell));
  return 0;
}

}  // namespace

int run_command_line(int argc, char** argv) {
  Arguments arguments;
  CLI::App app;
  define(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return report(app, error);
  }
  if (arguments.quiet) output::be_quiet();
  show_compiling(false);  // the tool has a line of its own: output/progress.hpp
  return run_chosen(app, arguments);
}

}  // namespace regard::cli
