// Unfinished: deletes a file if a signal ends the tool while the file is being written.
#pragma once

namespace regard::cli {

// During the lifetime of this object, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU and SIGXFSZ first
// delete the file at `path`, and then end the tool as if nothing had caught them. Make one at a
// time, on the main thread. `path` must stay valid.
class Unfinished {
 public:
  explicit Unfinished(const char* path);
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
};

}  // namespace regard::cli
