// The thread pool behind one function: parallel(workers, work, run).
#pragma once

#include <cstdint>

#include "regard/regard.hpp"
#include "threads/function_ref.hpp"

namespace regard {

// How many workers a call may use: Run::threads, or every core that the process may use.
int worker_count(const Run&);

// Calls work(worker) once for each worker in [0, workers), on the caller's Executor if there is
// one, else on the library's own pool and the calling thread; returns when all have returned.
// Workers may run one after another, so none may wait for another to begin. work must not throw.
void parallel(int workers, const Run&, FunctionRef<void(int)> work);

// Calls task(n, worker) for each n in [0, tasks), in ascending order. If a task runs out of memory,
// no further task begins, and an Error follows once all have returned; such a task must not be one
// that others wait for.
void parallel_tasks(std::int64_t tasks, int workers, const Run&,
                    FunctionRef<void(std::int64_t task, int worker)> task);

}  // namespace regard
