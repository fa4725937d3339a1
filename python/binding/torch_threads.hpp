// PyTorch's own threads as the library's Executor. PyTorch's OpenMP threads wait for its next
// operator by spinning, on the cores that other threads would need.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <regard/regard.hpp>

namespace regard::python {

// Knows parallel_for of PyTorch's stable C ABI by its address, so that the wheel is built without
// PyTorch and serves every version.
class TorchThreads {
 public:
  explicit TorchThreads(std::uintptr_t parallel_for)
      : parallel_for_(reinterpret_cast<ParallelFor*>(parallel_for)) {}

  // Empty after leave().
  Executor executor() {
    return left_ ? Executor{} : Executor{.run = &TorchThreads::run, .self = this};
  }

  // In a process that was forked: OpenMP's threads did not survive, and OpenMP would wait for them.
  void leave() { left_ = true; }

 private:
  using Range = void(std::int64_t begin, std::int64_t end, void* context);
  using ParallelFor = std::int32_t(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                   Range* range, void* context);

  // Within a parallel region of PyTorch, the calling thread runs all tasks. The library notices
  // tasks that are left out because of a failure.
  static void run(void* self, int tasks, void (*task)(void* context, int index), void* context) {
    struct Call {
      void (*task)(void*, int);
      void* context;
    } call{task, context};
    const auto run_range = [](std::int64_t begin, std::int64_t end, void* it) {
      const Call& made = *static_cast<Call*>(it);
      for (std::int64_t index = begin; index < end; ++index) {
        made.task(made.context, static_cast<int>(index));
      }
    };
    static_cast<TorchThreads*>(self)->parallel_for_(0, tasks, 1, run_range, &call);
  }

  ParallelFor* parallel_for_;
  std::atomic<bool> left_{false};
};

inline void bind_torch_threads(nanobind::module_& m) {
  namespace nb = nanobind;
  nb::class_<TorchThreads>(m, "TorchThreads", "PyTorch's own threads, for calls on the CPU.")
      .def(nb::init<std::uintptr_t>(), nb::arg("parallel_for"))
      .def("leave", &TorchThreads::leave);
}

}  // namespace regard::python
