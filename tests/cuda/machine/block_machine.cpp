// The order in which threads run, and their cooperation; memory is in shared_memory.cpp.
#include "block_machine.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "request.hpp"
#include "traps.hpp"

namespace regard::emulated {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackSize = 512 << 10;
#else
constexpr std::size_t kStackSize = 128 << 10;
#endif
constexpr int kMostThreads = 1024, kMostBlocks = 8;
// As on the chip: of an address, a descriptor has what is within a block.
constexpr std::uint32_t kClusterStride = 1 << 18;

const char* name_of(Call call) {
  switch (call) {
    case Call::sync_block:
      return "sync_block";
    case Call::sync_cluster:
      return "sync_cluster";
    case Call::any_in_block:
      return "any_in_block";
    case Call::sync_warp:
      return "sync_warp";
    case Call::any_in_warp:
      return "any_in_warp";
    case Call::shuffle:
      return "a shuffle";
    case Call::ldmatrix:
      return "ldmatrix";
    case Call::multiply:
      return "a matrix product";
    case Call::bar_sync:
      return "bar_sync";
    case Call::bar_arrive:
      return "bar_arrive";
    case Call::stmatrix:
      return "stmatrix";
    case Call::wgmma_wait:
      return "wgmma_wait";
    case Call::exit:
      return "the kernel's end";
  }
  return "";
}

BlockMachine* running = nullptr;

std::string place(Call call, Where where) {
  const char* const slash = std::strrchr(where.file, '/');
  std::string text = name_of(call);
  if (where.line) {
    text += " (" + std::string(slash ? slash + 1 : where.file) + ":" + std::to_string(where.line);
    text += ")";
  }
  return text;
}

}  // namespace

// ------------------------------------------------------------------------------------- launches

void BlockMachine::run(const Launch& launch) {
  prepare(launch);
  running = this;
  const Traps traps([](const char* what, const void* instruction) {
    running->trapped_at_ = instruction;
    running->fail(what, {});
  });
  const int64 clusters = launch.blocks / launch.cluster;
  for (int64 n = 0; n < clusters; ++n) {
    const bool backward = !launch.blocks_in_order && launch.order != Order::forward;
    begin_block((backward ? clusters - 1 - n : n) * launch.cluster);
    Thread& first = *threads_[warp_order_[0] * 32 + warps_[warp_order_[0]].next_lane];
    thread = first.index;
    switch_fiber(host_, first.fiber);
    if (fault_.empty()) continue;
    threads_.clear();  // they were left in mid-call
    stacks_.reset();
    throw Fault(std::exchange(fault_, {}) + lines_of(std::exchange(trapped_at_, nullptr)));
  }
}

void BlockMachine::prepare(const Launch& launch) {
  if (launch.threads <= 0 || launch.threads % 32 != 0 || launch.threads > kMostThreads) {
    throw Fault("a block of " + std::to_string(launch.threads) + " threads");
  }
  if (launch.cluster < 1 || launch.cluster > kMostBlocks || launch.blocks % launch.cluster != 0) {
    throw Fault("clusters of " + std::to_string(launch.cluster) + " blocks in a grid of " +
                std::to_string(launch.blocks));
  }
  launch_ = launch;
  threads = launch.threads;
  stride_ = launch.cluster > 1 ? kClusterStride : std::uint32_t(launch.shared_bytes);
  const int all = launch.threads * launch.cluster;
  random_state_ = launch.seed * 0x9E3779B97F4A7C15u + 1;
  if (!stacks_) stacks_ = std::make_unique<Stacks>(kMostThreads * kMostBlocks, kStackSize);
  while (int(threads_.size()) < all) {
    const int index = int(threads_.size());
    threads_.push_back(std::make_unique<Thread>());
    Thread& t = *threads_.back();
    t.machine = this;
    t.index = index;
    make_fiber(t.fiber, stacks_->bottom(index), stacks_->size(index), run_thread, &t);
  }
  warps_.resize(all / 32);
  warp_order_.resize(warps_.size());
  void* memory = nullptr;
  const int64 bytes = int64(stride_) * (launch.cluster - 1) + launch.shared_bytes;
  if (posix_memalign(&memory, 1024, std::max<int64>(bytes, 1))) throw std::bad_alloc();
  shared_ = {static_cast<unsigned char*>(memory), std::free};
  words_.assign((bytes + 3) / 4, {});
  lane_step_ = launch.order == Order::forward ? 1 : launch.order == Order::backward ? 31 : 13;
}

void BlockMachine::begin_block(int64 index) {
  block = index;
  done_ = 0;
  for (int n = 0; n < launch_.cluster; ++n) {  // NaN in every format
    std::memset(shared_.get() + n * stride_, 0xff, launch_.shared_bytes);
  }
  std::fill(words_.begin(), words_.end(), SharedWord{});
  for (int t = 0; t < launch_.threads * launch_.cluster; ++t) {
    threads_[t]->groups = 0;
    threads_[t]->copies.clear();
    threads_[t]->stores.clear();
    threads_[t]->products.clear();
    threads_[t]->accumulators.clear();
    threads_[t]->product_groups = 0;
  }
  barriers_.clear();
  boxes_.clear();
  at_threads_.clear();
  waits_in_vain_ = 0;
  for (Warp& warp : warps_) {
    warp.state = Warp::State::runnable;
    warp.arrived = 0;
    warp.parked = 0;
  }
  release_barrier();
}

void BlockMachine::run_thread(void* argument) {
  Thread& t = *static_cast<Thread*>(argument);
  for (;;) {
    BlockMachine& m = *t.machine;
    m.launch_.kernel(m.launch_.params);
    m.finish_thread(t);
    Request request{.call = Call::exit};
    m.arrive(request);
  }
}

// ---------------------------------------------------------------------------------- taking turns

std::uint64_t BlockMachine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

// The next lane that has not come to the warp's call yet; the same where all others have.
int BlockMachine::lane_after(const Warp& warp, int lane) const {
  do lane = (lane + lane_step_) % 32;
  while (warp.parked >> lane & 1);
  return lane;
}

void BlockMachine::switch_thread(int index) {
  Thread& from = *threads_[thread];
  thread = index;
  if (&from != threads_[index].get()) switch_fiber(from.fiber, threads_[index]->fiber);
}

// Goes on with the first warp that can; with the host where all are done.
void BlockMachine::switch_warp() {
  for (const int w : warp_order_) {
    if (warps_[w].state == Warp::State::runnable) {
      switch_thread(w * 32 + warps_[w].next_lane);
      return;
    }
  }
  if (done_ < int(warps_.size())) fail("every warp waits for another", {});
  switch_fiber(threads_[thread]->fiber, host_);
}

// Lets another warp run for a while, now and then.
bool BlockMachine::maybe_yield() {
  if (launch_.order != Order::mixed || warps_.size() == 1 || random() % 8 != 0) return false;
  std::rotate(warp_order_.begin(), warp_order_.begin() + 1 + random() % (warps_.size() - 1),
              warp_order_.end());
  switch_warp();
  return true;
}

// The calling thread has come to a cooperative call; returns when its warp has made it.
void BlockMachine::arrive(Request& request) {
  const int me = thread;
  Warp& warp = warps_[me / 32];
  warp.request[me % 32] = &request;
  warp.parked |= 1u << me % 32;
  if (++warp.arrived < 32) {
    switch_thread(me / 32 * 32 + lane_after(warp, me % 32));
    return;
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Request& other = *warp.request[lane];
    if (other.call != request.call || other.where.line != request.where.line) {
      fail_at(me, request.where, "lane %d is at %s while lane %d is at %s", me % 32,
              place(request.call, request.where).c_str(), lane,
              place(other.call, other.where).c_str());
    }
  }
  warp.arrived = 0;
  warp.parked = 0;
  warp.next_lane = me % 32;
  finish_call(warp);
}

void BlockMachine::finish_call(Warp& warp) {
  Request& request = *warp.request[thread % 32];
  switch (request.call) {
    case Call::sync_block:
    case Call::sync_cluster:
    case Call::any_in_block:
      warp.state = Warp::State::at_barrier;
      enter_barrier(warp);
      return;
    case Call::exit:
      warp.state = Warp::State::done;
      ++done_;
      enter_barrier(warp);
      return;
    case Call::sync_warp:
      ++warp.epoch;
      break;
    case Call::any_in_warp: {
      bool any = false;
      for (const Request* r : warp.request) any |= r->value;
      for (Request* r : warp.request) r->value = any;
      break;
    }
    case Call::shuffle:
      perform_shuffle(warp);
      break;
    case Call::ldmatrix:
      perform_load(warp);
      break;
    case Call::multiply:
      perform_multiply(warp);
      break;
    case Call::bar_sync:
      enter_threads(warp);
      return;
    case Call::bar_arrive:
      bar_arrive(warp);
      break;
    case Call::stmatrix:
      perform_store(warp);
      break;
    case Call::wgmma_wait:
      perform_products(warp);
      break;
  }
  maybe_yield();
}

// The warp has come to a barrier of its block or cluster (or, with others waiting there, to its
// end).
void BlockMachine::enter_barrier(Warp& warp) {
  const int count = warps_of_block(), first = int(&warp - warps_.data()) / count * count;
  if (!end_barrier(first, first + count, Call::sync_block)) {
    end_barrier(0, int(warps_.size()), Call::sync_cluster);
  }
  switch_warp();
}

// Lets these warps go on where all of them have come to their barrier: one of the cluster, or of
// its block.
bool BlockMachine::end_barrier(int first_warp, int end_warp, Call scope) {
  const Warp* first = nullptr;
  for (int n = first_warp; n < end_warp; ++n) {
    const Warp& w = warps_[n];
    if (w.state != Warp::State::at_barrier && w.state != Warp::State::done) return false;
    if (w.state == Warp::State::at_barrier && !first) first = &w;
  }
  if (!first) return false;
  const auto is_of_cluster = [](const Warp& w) { return w.request[0]->call == Call::sync_cluster; };
  bool any = false;
  for (int n = first_warp; n < end_warp; ++n) {
    const Warp& w = warps_[n];
    if (w.state == Warp::State::done && scope == Call::sync_cluster) continue;
    const Request &a = *first->request[0], &b = *w.request[0];
    if (a.call != b.call || a.where.line != b.where.line) {
      fail_at(int(first - warps_.data()) * 32, a.where, "warp %d is at %s while warp %d is at %s",
              int(first - warps_.data()), place(a.call, a.where).c_str(), n,
              place(b.call, b.where).c_str());
    }
    for (const Request* r : w.request) any |= r->value;
  }
  if (scope == Call::sync_block && is_of_cluster(*first)) return false;
  for (int n = first_warp; n < end_warp; ++n) {
    Warp& w = warps_[n];
    if (w.state == Warp::State::done) continue;
    for (Request* r : w.request) r->value = any;
    w.state = Warp::State::runnable;
  }
  release_barrier();
  return true;
}

void BlockMachine::release_barrier() {
  ++epoch_;
  for (Warp& warp : warps_) ++warp.epoch;
  for (int i = 0; i < int(warps_.size()); ++i) warp_order_[i] = i;
  if (launch_.order == Order::backward) std::reverse(warp_order_.begin(), warp_order_.end());
  if (launch_.order != Order::mixed) return;
  for (std::size_t i = warps_.size(); i > 1; --i) {
    std::swap(warp_order_[i - 1], warp_order_[random() % i]);
  }
}

// ------------------------------------------------------------------------------------ cooperation

void BlockMachine::sync_block(Where where) {
  Request request{.call = Call::sync_block, .where = where};
  arrive(request);
}

bool BlockMachine::any_in_block(bool value, Where where) {
  Request request{.call = Call::any_in_block, .where = where, .value = value};
  arrive(request);
  return request.value;
}

void BlockMachine::sync_cluster(Where where) {
  Request request{.call = Call::sync_cluster, .where = where};
  arrive(request);
}

void BlockMachine::sync_warp(Where where) {
  Request request{.call = Call::sync_warp, .where = where};
  arrive(request);
}

bool BlockMachine::any_in_warp(bool value, Where where) {
  Request request{.call = Call::any_in_warp, .where = where, .value = value};
  arrive(request);
  return request.value;
}

uint64 BlockMachine::shuffle(uint64 bits, int from, Where where) {
  Request request{.call = Call::shuffle, .where = where, .bits = bits, .from = from};
  arrive(request);
  return request.received;
}

void BlockMachine::ldmatrix(uint32 (&m)[4], uint32 row, bool transposed, Where where) {
  Request request{.call = Call::ldmatrix, .where = where, .value = transposed};
  request.row = row;
  request.matrices = &m;
  arrive(request);
}

void BlockMachine::multiply(Format format, float (&d)[4], const uint32 (&a)[4], uint32 b0,
                            uint32 b1, Where where) {
  Request request{.call = Call::multiply, .where = where};
  request.format = format;
  request.d = &d;
  request.a = &a;
  request.b[0] = b0;
  request.b[1] = b1;
  arrive(request);
}

// Blocks run one after another, and a turn may only wait for an earlier one.
void BlockMachine::wait_semaphore(const int32* turn, int32 mine, Where where) {
  if (*turn == mine) return;
  fail_at(thread, where, "waits for turn %d, which is %d and stays so: a deadlock", int(mine),
          int(*turn));
}

// ----------------------------------------------------------------------------------------- faults

void BlockMachine::fail(const char* reason, Where where) { fail_at(thread, where, "%s", reason); }

void BlockMachine::fail_at(int by, Where where, const char* format, ...) {
  char reason[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  char text[700];
  std::snprintf(text, sizeof text, "%s:%d: block %lld, thread %d (warp %d, lane %d): %s",
                where.file, where.line, static_cast<long long>(block), by, by / 32, by % 32,
                reason);
  end_with(text);
}

void BlockMachine::end_with(std::string fault) {
  fault_ = std::move(fault);
  switch_fiber(threads_[thread]->fiber, host_);
  std::abort();  // nobody switches back
}

}  // namespace regard::emulated
