// The thread pool behind one function: parallel(workers, work, run).
#pragma once

#include <cstdint>
#include <limits>

#include "regard/regard.hpp"
#include "threads/function_ref.hpp"

namespace regard {

// How many workers a call may use: Run::threads, or every core that the process may use.
int worker_count(const Run&);

// How many workers a call has, and about how long one alone would take: threads that sleep are
// woken where they save more time than that takes.
struct Workers {
  int count;
  std::int64_t nanoseconds = std::numeric_limits<std::int64_t>::max();
};

// Calls work(worker) once for each worker in [0, workers), on the caller's Executor if there is
// one, else on the library's own pool and the calling thread; returns when all have returned.
// Workers may run one after another, so none may wait for another to begin. work must not throw.
void parallel(Workers, const Run&, FunctionRef<void(int)> work);
inline void parallel(int workers, const Run& run, FunctionRef<void(int)> work) {
  parallel(Workers{workers}, run, work);
}

// Calls task(n, worker) for each n in [0, tasks), in ascending order. If a task runs out of memory,
// no further task begins, and an Error follows once all have returned; such a task must not be one
// that others wait for.
void parallel_tasks(std::int64_t tasks, Workers, const Run&,
                    FunctionRef<void(std::int64_t task, int worker)> task);
inline void parallel_tasks(std::int64_t tasks, int workers, const Run& run,
                           FunctionRef<void(std::int64_t task, int worker)> task) {
  parallel_tasks(tasks, Workers{workers}, run, task);
}

}  // namespace regard
