// Collectives over NCCL, which is opened at run time.
#include <string>

#include "cuda/shared_library.hpp"
#include "distributed/ranks.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

using NcclResult = int;    // 0: success
constexpr int kBytes = 1;  // ncclUint8

// Signatures of NCCL 2.7, the first version that sends and receives.
struct Nccl {
  NcclResult (*count)(void* communicator, int* size);
  NcclResult (*rank)(void* communicator, int* rank);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void* data, std::size_t count, int type, int rank, void* communicator,
                     void* stream);
  NcclResult (*receive)(void* data, std::size_t count, int type, int rank, void* communicator,
                        void* stream);
  const char* (*error_text)(NcclResult);
};

struct Opened {
  Nccl functions{};
  std::string why_not;
};

Opened open_nccl() {
  constexpr const char* kHowToGetIt =
      "; `pip install nvidia-nccl-cu13` or the Debian package libnccl2 of NVIDIA brings it, and "
      "LD_LIBRARY_PATH names a folder that is not the system's";
  Opened o;
  cuda_backend::SharedLibrary library;
  if (!library.open("libnccl.so.2")) {
    o.why_not = std::string("libnccl.so.2 was not found") + kHowToGetIt;
    return o;
  }
  std::string missing;
  const auto find = [&](const char* symbol, auto& function) {
    library.find(symbol, function, missing);
  };
  Nccl& n = o.functions;
  find("ncclCommCount", n.count);
  find("ncclCommUserRank", n.rank);
  find("ncclGroupStart", n.group_start);
  find("ncclGroupEnd", n.group_end);
  find("ncclSend", n.send);
  find("ncclRecv", n.receive);
  find("ncclGetErrorString", n.error_text);
  if (!missing.empty()) {
    o.why_not = "libnccl.so.2 has no " + missing + ": NCCL 2.7 or newer is needed" + kHowToGetIt;
  }
  return o;
}

// Never destroyed: other threads may still communicate while the process ends.
const Opened& opened() {
  static const Opened* const once = new Opened(open_nccl());
  return *once;
}

const char* exchange(void* communicator, const Send* sends, std::size_t send_count,
                     const Receive* receives, std::size_t receive_count, void* stream) {
  const Nccl& n = opened().functions;
  NcclResult result = n.group_start();
  if (result != 0) return n.error_text(result);
  for (std::size_t i = 0; i < send_count && result == 0; ++i) {
    result = n.send(sends[i].data, sends[i].bytes, kBytes, sends[i].rank, communicator, stream);
  }
  for (std::size_t i = 0; i < receive_count && result == 0; ++i) {
    const Receive& one = receives[i];
    result = n.receive(one.data, one.bytes, kBytes, one.rank, communicator, stream);
  }
  const NcclResult ended = n.group_end();  // also after a failure, or the next group would be ours
  if (result == 0) result = ended;
  return result == 0 ? nullptr : n.error_text(result);
}

}  // namespace

Collectives nccl_collectives(void* communicator) {
  require(communicator != nullptr, "communicator", "null", "must be an ncclComm_t");
  const auto& [n, why_not] = opened();
  if (!why_not.empty()) refuse("communicator", "an ncclComm_t", why_not, Code::unavailable);
  Collectives made{.self = communicator, .exchange = exchange, .memory = Device::Kind::cuda};
  const auto check = [&](const char* function, NcclResult result) {
    if (result != 0) refuse(function, result, n.error_text(result), Code::device_failure);
  };
  check("ncclCommCount", n.count(communicator, &made.size));
  check("ncclCommUserRank", n.rank(communicator, &made.rank));
  return made;
}

}  // namespace regard::distributed
