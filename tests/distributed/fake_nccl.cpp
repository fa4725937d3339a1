// The libnccl.so.2 of the tests: what src/distributed/nccl.cpp calls, as NCCL's documentation has
// it. Messages wait for the end of their group.
#include "tests/distributed/fake_nccl.hpp"

#include <vector>

using namespace regard::distributed;
using regard::tests::FakeCommunicator;

namespace {

constexpr int kOk = 0, kInvalidArgument = 4, kInvalidUsage = 5, kUint8 = 1;

struct Group {
  int depth = 0;
  FakeCommunicator* communicator = nullptr;
  std::vector<Send> sends;
  std::vector<Receive> receives;
};
thread_local Group group;

int join(int type, int peer, FakeCommunicator* communicator) {
  if (group.depth == 0) return kInvalidUsage;
  if (type != kUint8 || peer < 0 || peer >= communicator->ranks.size || communicator->fails) {
    return kInvalidArgument;
  }
  group.communicator = communicator;
  return kOk;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int ncclCommCount(FakeCommunicator* c, int* size) { return *size = c->ranks.size, kOk; }
FAKE int ncclCommUserRank(FakeCommunicator* c, int* rank) { return *rank = c->ranks.rank, kOk; }
FAKE int ncclGroupStart() { return ++group.depth, kOk; }
FAKE int ncclSend(const void* data, std::size_t count, int type, int peer, FakeCommunicator* c,
                  void*) {
  if (const int failure = join(type, peer, c)) return failure;
  return group.sends.push_back({peer, data, count}), kOk;
}
FAKE int ncclRecv(void* data, std::size_t count, int type, int peer, FakeCommunicator* c, void*) {
  if (const int failure = join(type, peer, c)) return failure;
  return group.receives.push_back({peer, data, count}), kOk;
}
FAKE int ncclGroupEnd() {
  if (group.depth != 1) return kInvalidUsage;
  const Group done = group;
  group = {};
  if (!done.communicator) return kOk;
  const Collectives& ranks = done.communicator->ranks;
  return ranks.exchange(ranks.self, done.sends.data(), done.sends.size(), done.receives.data(),
                        done.receives.size(), nullptr)
             ? kInvalidUsage
             : kOk;
}
FAKE const char* ncclGetErrorString(int result) {
  return result == kInvalidArgument ? "invalid argument" : "invalid usage";
}
