// What Linux and macOS share, for their own files.
#pragma once

namespace regard::system {

// The calling thread runs no handlers of signals, except those of its own faults.
void leave_signals();

}  // namespace regard::system
