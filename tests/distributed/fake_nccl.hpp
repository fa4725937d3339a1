// What the tests' libnccl.so.2 takes for an ncclComm_t.
#pragma once

#include "regard/distributed.hpp"

namespace regard::tests {

struct FakeCommunicator {
  distributed::Collectives ranks{};  // by which the messages of a group travel
  bool fails = false;                // ncclSend does
};

}  // namespace regard::tests
