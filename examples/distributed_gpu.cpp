// One causal sequence over two GPUs of this process, a thread for each, which exchange by NCCL;
// docs/distributed.md shows the call. Without two GPUs or without NCCL it says so.
#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <regard/cuda.hpp>
#include <regard/distributed.hpp>
#include <string>
#include <thread>
#include <vector>

#include "distributed_sequence.hpp"

namespace {

// A program that links NCCL calls ncclCommInitAll, or ncclCommInitRank in each process.
std::string make_communicators(void* (&communicators)[2]) {
  void* const nccl = dlopen("libnccl.so.2", RTLD_NOW);
  if (!nccl) return "libnccl.so.2 was not found";
  const auto init =
      reinterpret_cast<int (*)(void**, int, const int*)>(dlsym(nccl, "ncclCommInitAll"));
  const int devices[2] = {0, 1};
  if (!init || init(communicators, 2, devices) != 0) return "ncclCommInitAll failed";
  return "";
}

// A copy of a tensor in a GPU's memory, and back.
class OnDevice {
 public:
  OnDevice(int device, const regard::Tensor& host)
      : device_(device), host_(host), tensor_(host), bytes_(regard::size_of(host.type)) {
    for (int axis = 0; axis < host.rank; ++axis) bytes_ *= std::size_t(host.sizes[axis]);
    tensor_.data = regard::cuda_memory::allocate(device, bytes_);
    regard::cuda_memory::to_device(device, tensor_.data, host.data, bytes_);
  }
  ~OnDevice() { regard::cuda_memory::free(device_, tensor_.data); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  operator const regard::Tensor&() const { return tensor_; }
  void copy_back() const {
    regard::cuda_memory::to_host(device_, host_.data, tensor_.data, bytes_);
  }

 private:
  int device_;
  regard::Tensor host_, tensor_;
  std::size_t bytes_;
};

void attend(int device, void* communicator, Sequence& part, const regard::distributed::Plan& plan) {
  const OnDevice q(device, part.q()), k(device, part.k()), v(device, part.v());
  const OnDevice dout(device, part.dout()), out(device, part.out()), lse(device, part.lse());
  const OnDevice dq(device, part.dq()), dk(device, part.dk()), dv(device, part.dv());
  // [nccl]
  namespace rd = regard::distributed;
  const rd::Collectives ranks = rd::nccl_collectives(communicator);          // an ncclComm_t
  const regard::Run run{.device = regard::cuda(device), .stream = nullptr};  // or a CUstream
  const regard::Attention attention{.q = q, .k = k, .v = v};
  rd::forward(attention, {.out = out, .lse = lse}, plan, ranks, run);
  rd::backward(attention, {.out = out, .lse = lse, .dout = dout}, {.dq = dq, .dk = dk, .dv = dv},
               plan, ranks, run);
  // [/nccl]
  for (const OnDevice* result : {&out, &dq, &dk, &dv}) result->copy_back();
}

// Whether both GPUs' rows are those of one call on the CPU.
bool is_right(regard::distributed::Scheme scheme, void* const (&communicators)[2],
              Sequence& whole) {
  const auto plan = regard::distributed::plan({.length = kLength,
                                               .heads_q = kHeads,
                                               .heads_kv = kHeadsOfKeys,
                                               .head_size = kSize,
                                               .type = regard::f32,
                                               .causal = regard::Causal::top_left},
                                              2, scheme);
  std::vector<Sequence> parts;
  for (int rank = 0; rank < 2; ++rank) parts.push_back(whole.rows_of(plan.positions(rank)));
  std::vector<std::string> faults(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        attend(rank, communicators[rank], parts[std::size_t(rank)], plan);
      } catch (const std::exception& error) {
        faults[std::size_t(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::fputs(plan.explain().c_str(), stdout);
  bool all_right = true;
  for (int rank = 0; rank < 2; ++rank) {
    const Sequence& part = parts[std::size_t(rank)];
    const double most = largest_difference(whole, part, plan.positions(rank));
    std::printf("GPU %d: at most %.1e from the CPU %s\n", rank, most,
                faults[std::size_t(rank)].c_str());
    all_right = all_right && most < 1e-4 && faults[std::size_t(rank)].empty();
  }
  return all_right;
}

}  // namespace

int main() {
  if (const std::size_t count = regard::cuda_setup().devices.size(); count < 2) {
    std::printf("two GPUs are needed, %zu found\n", count);
    return 0;
  }
  void* communicators[2] = {};
  if (const std::string fault = make_communicators(communicators); !fault.empty()) {
    std::printf("NCCL is needed: %s\n", fault.c_str());
    return 0;
  }
  Sequence whole(kLength);
  whole.draw();
  using regard::distributed::Scheme;
  bool all_right = true;
  for (const Scheme scheme : {Scheme::gather, Scheme::ulysses, Scheme::ring}) {
    all_right = is_right(scheme, communicators, whole) && all_right;
  }
  return all_right ? 0 : 1;
}
