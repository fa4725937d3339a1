// Ranks as threads of one process, which exchange through mailboxes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "regard/distributed.hpp"

namespace regard::tests {

// What the ranks of a test have sent each other and nobody has received yet.
class Mail {
 public:
  explicit Mail(int size) : size_(size), boxes_(std::size_t(size * size)) {
    for (int rank = 0; rank < size; ++rank) ends_.push_back({this, rank});
  }

  distributed::Collectives of(int rank) {
    return {.rank = rank, .size = size_, .self = &ends_[std::size_t(rank)], .exchange = exchange};
  }

  // The n-th exchange of this rank fails; from then on the others wait for a moment only.
  void break_at(int rank, int call) {
    broken_rank_ = rank;
    broken_call_ = call;
  }

  std::int64_t received(int rank) const { return ends_[std::size_t(rank)].bytes; }
  bool is_empty() const {
    for (const auto& box : boxes_) {
      if (!box.empty()) return false;
    }
    return true;
  }

 private:
  struct End {
    Mail* mail;
    int rank;
    int calls = 0;
    std::int64_t bytes = 0;  // received
  };
  using Box = std::deque<std::string>;  // of one rank for another

  Box& box(int from, int to) { return boxes_[std::size_t(from * size_ + to)]; }

  static const char* exchange(void* self, const distributed::Send* sends, std::size_t send_count,
                              const distributed::Receive* receives, std::size_t receive_count,
                              void*) {
    End& end = *static_cast<End*>(self);
    return end.mail->exchange(end, {sends, sends + send_count},
                              {receives, receives + receive_count});
  }

  const char* exchange(End& end, const std::vector<distributed::Send>& sends,
                       const std::vector<distributed::Receive>& receives) {
    std::unique_lock lock(mutex_);
    if (end.rank == broken_rank_ && ++end.calls == broken_call_) {
      is_broken_ = true;
      arrived_.notify_all();
      return "the wire is cut";
    }
    for (const distributed::Send& one : sends) {
      if (one.bytes == 0 || one.rank == end.rank) return "nothing to send";
      box(end.rank, one.rank).emplace_back(static_cast<const char*>(one.data), one.bytes);
    }
    arrived_.notify_all();
    for (const distributed::Receive& one : receives) {
      Box& from = box(one.rank, end.rank);
      const auto came = [&] { return !from.empty(); };
      arrived_.wait_for(lock, std::chrono::seconds(60), [&] { return came() || is_broken_; });
      if (!arrived_.wait_for(lock, std::chrono::milliseconds(50), came)) return "nothing came";
      if (from.front().size() != one.bytes) return "a message has another size";
      std::memcpy(one.data, from.front().data(), one.bytes);
      from.pop_front();
      end.bytes += std::int64_t(one.bytes);
    }
    return nullptr;
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Box> boxes_;
  std::vector<End> ends_;
  int broken_rank_ = -1, broken_call_ = 0;
  bool is_broken_ = false;
};

// Calls work(rank) on a thread for each rank; the text of what each has thrown, "" for none.
inline std::vector<std::string> on_ranks(int size, const std::function<void(int)>& work) {
  std::vector<std::string> errors(std::size_t(size), "");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const std::exception& error) {
        errors[std::size_t(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace regard::tests
