// Work beside which other Python threads run.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace regard::python {

// Takes the interpreter's lock back. A daemon thread may come here after the interpreter has ended.
// Python before 3.14 then ends the thread by unwinding its stack, which would end the process where
// it meets C++ code that lets nothing through. The thread sleeps instead, as it does in 3.14.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {  // the unwinding; must not be left
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Runs `work` without the interpreter's lock; what it throws comes through with the lock.
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
