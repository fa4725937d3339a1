// BlockMachine: runs a kernel's blocks one after another (those of a cluster together), each thread
// as a fiber, and checks what a GPU would not say.
//
// Threads change places at cooperative calls only. A warp's 32 lanes must make the same call from
// the same line; the last to arrive does the work for all. See README.md for what is checked.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "machine.hpp"

namespace regard::emulated {

// What a kernel did wrong: block, thread, line and reason.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In which order the warps of a block go on after a barrier. `mixed` is a random order, and warps
// also change places between barriers.
enum class Order { forward, backward, mixed };

struct Launch {
  void (*kernel)(const void* params) = nullptr;  // what each thread runs
  const void* params = nullptr;
  int64 blocks = 0;
  int threads = 0;  // of a block
  int64 shared_bytes = 0;
  int cluster = 1;  // blocks that run together and read each other's shared memory
  Order order = Order::forward;
  bool blocks_in_order = true;  // else in the same order as the warps
  std::uint64_t seed = 1;
};

// A word of 4 bytes of shared memory: who wrote it last, who has read it since, and when.
struct SharedWord {
  std::uint32_t written_in = 0;  // the epoch: barriers so far
  std::uint32_t written_in_warp = 0;
  std::uint32_t read_in = 0;
  std::uint32_t read_in_warp = 0;
  std::int16_t writer = -1;
  std::int16_t reader = -1;
  bool read_by_lanes = false;  // by several lanes of one warp
  bool read_by_warps = false;
  std::int16_t copying = -1;  // the thread with a copy on its way here
};

struct PendingCopy {
  std::uint32_t to;
  int bytes;
  int group;
  unsigned char data[16];
};

enum class Call : std::uint8_t;
struct Request;

// A barrier in shared memory.
struct SharedBarrier {
  int arrivals = 0;  // of a phase
  int missing = 0;   // of the present one
  int64 bytes = 0;   // that are to come
  int phase = 0;
};

struct BoxOnItsWay {
  uint32 to;
  uint32 barrier;
  std::vector<unsigned char> data;
};

// Read from shared memory when its group is waited for, and not before.
struct BoxToStore {
  BoxMap map;
  int at[4];
  uint32 from;
  Where where;
};

// The same of a product: its accumulators are NaN, and its operands must stay, until then.
struct ProductOnItsWay {
  WarpgroupProduct product;
  uint32 registers[4];
  int group;
  Where where;
};

struct Warp {
  enum class State : std::uint8_t { runnable, at_barrier, at_threads, done };

  Request* request[32] = {};
  int arrived = 0;
  std::uint32_t parked = 0;  // the lanes that have arrived
  int next_lane = 0;         // who goes on when the warp does
  State state = State::runnable;
  int barrier = 0;  // at_threads: the number
  std::uint32_t epoch = 1;
};

class BlockMachine final : public Machine {
 public:
  BlockMachine() = default;
  ~BlockMachine() = default;

  void run(const Launch&);  // throws Fault

  void sync_block(Where) override;
  void sync_cluster(Where) override;
  bool any_in_block(bool value, Where) override;
  void sync_warp(Where) override;
  bool any_in_warp(bool value, Where) override;
  uint64 shuffle(uint64 bits, int from, Where) override;
  void ldmatrix(uint32 (&m)[4], uint32 row, bool transposed, Where) override;
  void multiply(Format, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Where) override;
  void* shared_memory(int64 bytes, Where) override;
  uint32 shared_address(const void* pointer, Where) override;
  uint32 address_in_cluster(uint32 own, int block, Where) override;
  void* shared_at(uint32 address, int bytes, Access, Where) override;
  void copy(uint32 to, const void* from, int bytes, int valid, bool asynchronous, Where) override;
  void cp_async_commit() override;
  void cp_async_wait(int pending, Where) override;
  int64 block_count() override { return launch_.blocks; }
  void mbarrier_init(uint32 address, int arrivals, Where) override;
  void mbarrier_inval(uint32 address, Where) override;
  void arrive(uint32 address, int bytes, Where) override;
  void mbarrier_wait(uint32 address, int parity, Where) override;
  void bar_sync(int number, int threads, Where) override;
  void bar_arrive(int number, int threads, Where) override;
  void tma_load(uint32 to, const BoxMap&, const int (&at)[4], uint32 barrier, Where) override;
  void bulk_load(uint32 to, const void* from, int bytes, uint32 barrier, Where) override;
  void send_bytes(uint32 to, uint32 from, int bytes, uint32 barrier, Where) override;
  void tma_store(const BoxMap&, const int (&at)[4], uint32 from, Where) override;
  void tma_store_commit() override;
  void wait_stores(Where) override;
  void stmatrix(uint32 row, const uint32 (&m)[4], Where) override;
  void multiply(const WarpgroupProduct&, Where) override;
  void wgmma_commit() override;
  void wgmma_wait(int pending, Where) override;
  void wait_semaphore(const int32* turn, int32 mine, Where) override;
  void check_aligned(const void* pointer, int bytes, Where) override;
  [[noreturn]] void fail(const char* reason, Where) override;

 private:
  struct Thread {
    Fiber fiber;
    BlockMachine* machine = nullptr;
    int index = 0;
    int groups = 0;  // of copies that were closed
    std::vector<PendingCopy> copies;
    std::vector<BoxToStore> stores;
    std::vector<ProductOnItsWay> products;
    std::map<float*, std::vector<float>> accumulators;  // as they were before the products
    int product_groups = 0;                             // that were closed
  };

  [[noreturn]] static void run_thread(void*);
  void prepare(const Launch&);
  void begin_block(int64 index);
  void arrive(Request&);
  void finish_call(Warp&);
  void enter_barrier(Warp&);
  bool end_barrier(int first_warp, int end_warp, Call);
  void release_barrier();
  int lane_after(const Warp&, int lane) const;
  void switch_thread(int index);
  void switch_warp();
  bool maybe_yield();
  std::uint64_t random();
  void perform_shuffle(Warp&);
  void perform_load(Warp&);
  void perform_multiply(Warp&);
  void perform_store(Warp&);
  void perform_products(Warp&);
  void perform_product(int first_lane, std::size_t index);
  bool bar_arrive(Warp&);
  void enter_threads(Warp&);
  SharedBarrier& barrier_at(uint32 address, Where);
  void end_phase(SharedBarrier&);
  void send(BoxOnItsWay, Where);
  void deliver_boxes(uint32 barrier);
  void finish_thread(Thread&);
  int warps_of_block() const { return launch_.threads / 32; }
  bool is_shared(uint32 address, int64 bytes) const;
  void check_range(uint32 address, int bytes, const char* what, Where);
  void note(uint32 address, int bytes, Access, int thread, Where);
  void note_read(SharedWord&, uint32 address, int by, int warp_index, Where);
  void note_write(SharedWord&, uint32 address, int by, Where);
  [[noreturn]] void fail_at(int thread, Where, const char* format, ...)
      __attribute__((format(printf, 4, 5)));
  [[noreturn]] void end_with(std::string fault);

  Launch launch_;
  std::unique_ptr<Stacks> stacks_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<int> warp_order_;
  std::unique_ptr<unsigned char[], void (*)(void*)> shared_{nullptr, nullptr};
  std::vector<SharedWord> words_;
  std::uint32_t epoch_ = 1;
  std::uint32_t stride_ = 0;  // from the shared memory of a block of the cluster to the next's
  int done_ = 0;
  int lane_step_ = 1;
  std::uint64_t random_state_ = 1;
  std::map<uint32, SharedBarrier> barriers_;
  std::vector<BoxOnItsWay> boxes_;
  std::map<int, int> at_threads_;  // threads that wait, by block and number
  int waits_in_vain_ = 0;
  Fiber host_;
  std::string fault_;
  const void* trapped_at_ = nullptr;
};

}  // namespace regard::emulated
