// The grammar of the command line for the parser.
#pragma once

#include "command_line/arguments.hpp"

namespace CLI {
class App;
}

namespace regard::cli {

// Adds every command and option; parsing then fills `arguments`, which must live as long as `app`.
void define(CLI::App& app, Arguments& arguments);

}  // namespace regard::cli
