// What operating systems do differently. One file implements it for each system, and
// system_posix.cpp what Linux and macOS share; nothing else in the library asks which system it
// runs on.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace regard::system {

// Within its scope the thread is not cancelled (pthread_cancel): its stack holds what other threads
// use, or it is in code that lets no exception through.
class CancellationDisabled {
 public:
  CancellationDisabled() noexcept;
  ~CancellationDisabled();
  CancellationDisabled(const CancellationDisabled&) = delete;
  CancellationDisabled& operator=(const CancellationDisabled&) = delete;

 private:
  int own_ = 0;  // the thread's state before
};

// Cores that the calling thread may use, 1 at least.
int usable_cores();

// Makes the calling thread one that helps any other: it may use the cores of the process's first
// thread, whoever started it, and leaves signals that are for the process to the program's threads.
void become_helper();

// Bytes of a data cache (level 1 to 3), 0 if unknown.
std::size_t cache_size(int level);

// Keeps the program or library that contains the code at `address` in memory until the process
// ends, so that dlclose cannot unmap it under threads that run it. The shared library is also
// linked with -z nodelete; a plug-in that contains the static library is kept by this call alone.
void keep_loaded(const void* address);

// Each later fork calls `child` in the child process.
void after_fork(void (*child)());

// "" if it is not set. A program with more rights than its caller ignores the caller's environment,
// as if no variable were set.
std::string variable(const char* name);

// Asks for AMX's tile registers, which Linux gives a process on demand. "" if they are allowed,
// else why not.
std::string allow_tiles();

// The files of the libraries that the process has loaded, as the loader names them.
std::vector<std::string> loaded_libraries();

// The file of the program; "" if unknown.
std::string program_file();

// Whether more rules than the mode say who may write to the file; true where that is unknown.
bool has_access_list(const char* path);

}  // namespace regard::system
