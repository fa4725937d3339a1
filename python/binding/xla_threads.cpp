#include "xla_threads.hpp"

#include <atomic>

namespace regard::python::xla {

namespace {

bool succeeded(const CallFrame& frame, Failure* failure) {
  if (!failure) return true;
  DestroyFailure destroy{.size = sizeof(DestroyFailure), .extension = nullptr, .failure = failure};
  frame.api->destroy_failure(&destroy);
  return false;
}

}  // namespace

// One call of an Executor. The calling thread starts whatever tasks no thread of XLA has started,
// because XLA may have no free one, or run this very call on its only one. A thread that comes late
// finds no task, and the last to leave frees the memory.
struct Threads::Work {
  const int tasks;
  void (*const task)(void* context, int index);
  void* const context;
  std::atomic<int> started{0};
  std::atomic<int> ended{0};
  std::atomic<int> users{1};

  void help() {
    for (int index = started++; index < tasks; index = started++) {
      task(context, index);
      if (++ended == tasks) ended.notify_all();
    }
  }

  void wait() const {
    for (int now = ended; now < tasks; now = ended) ended.wait(now);
  }

  void leave() {
    if (--users == 0) delete this;
  }
};

Executor Threads::executor() const {
  if (frame_.api->size < sizeof(Api)) return {};
  std::int64_t threads = 0;
  CountThreads count{.size = sizeof(CountThreads),
                     .extension = nullptr,
                     .context = frame_.context,
                     .threads = &threads};
  if (!succeeded(frame_, frame_.api->count_threads(&count))) return {};
  return {.run = &Threads::run, .self = const_cast<Threads*>(this)};
}

bool Threads::schedule(Work& work) const {
  const auto help = [](void* data) {
    Work& found = *static_cast<Work*>(data);
    found.help();
    found.leave();
  };
  ++work.users;
  Schedule schedule{.size = sizeof(Schedule),
                    .extension = nullptr,
                    .context = frame_.context,
                    .task = help,
                    .data = &work};
  if (succeeded(frame_, frame_.api->schedule(&schedule))) return true;
  work.leave();
  return false;
}

void Threads::run(void* self, int tasks, void (*task)(void* context, int index), void* context) {
  auto& work = *new Work{.tasks = tasks, .task = task, .context = context};
  for (int more = 1; more < tasks; ++more) {
    if (!static_cast<const Threads*>(self)->schedule(work)) break;
  }
  work.help();
  work.wait();
  work.leave();
}

}  // namespace regard::python::xla
