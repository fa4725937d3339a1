// Runs work without the interpreter's lock, so that other Python threads run at the same time.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace regard::python {

// Takes the interpreter's lock back. A daemon thread may get here after the interpreter has ended.
// Python before 3.14 then unwinds the thread's stack, which ends the process at the first noexcept
// function. The thread sleeps instead, as it does in Python 3.14.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {  // the unwinding, which must not go on
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Runs `work` without the interpreter's lock; rethrows its exception with the lock held.
template <class Work>
void without_gil(Work&& work) {
  PyThreadState* state = PyEval_SaveThread();
  std::exception_ptr thrown;
  try {
    std::forward<Work>(work)();
  } catch (...) {
    thrown = std::current_exception();
  }
  take_gil(state);
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace regard::python
