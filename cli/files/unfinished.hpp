// A file that is being written, removed if a signal ends the tool meanwhile.
#pragma once

namespace regard::cli {

// While one lives, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU and SIGXFSZ first delete the file at
// `path`, then end the tool as if they had not been caught. Made on the main thread; one at a time;
// the text of `path` must live as long.
class Unfinished {
 public:
  explicit Unfinished(const char* path);
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
};

}  // namespace regard::cli
