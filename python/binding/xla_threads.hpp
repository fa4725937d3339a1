// XLA's own threads of the CPU as the library's Executor.
#pragma once

#include <regard/regard.hpp>

#include "xla_abi.hpp"

namespace regard::python::xla {

class Threads {
 public:
  explicit Threads(const CallFrame& frame) : frame_(frame) {}

  // Empty where the runtime has no thread pool. Valid as long as this object.
  Executor executor() const;

 private:
  struct Work;

  static void run(void* self, int tasks, void (*task)(void* context, int index), void* context);
  bool schedule(Work&) const;

  const CallFrame& frame_;
};

}  // namespace regard::python::xla
