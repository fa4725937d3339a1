// Where a call's tensors lie: what is done there with rows, next to attention itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "regard/distributed.hpp"

namespace regard::distributed {

// Orders of work. On a GPU each is a stream: the call's, and one of the library's own next to it.
// On the CPU all work is done in turn.
enum class Lane : bool { call, beside };

class Memory {
 public:
  virtual ~Memory() = default;

  // What Collectives::exchange puts its work on.
  virtual void* stream(Lane) = 0;
  // What is put on the other lane from now on waits for what is on this one by now.
  virtual void let_other_wait_for(Lane) = 0;

  // The call's workspace: the caller's, or the library's own for as long as this lives.
  virtual std::byte* workspace() = 0;
  // A table of the host's, where kernels read it: the table itself, or a copy of it at `to`, of
  // ordinary memory, which may change as soon as the calls that read the table have returned.
  virtual const void* table(const void* host, std::size_t bytes, void* to) = 0;
  const void* table(const std::vector<std::int32_t>& host, void* to) {
    return table(host.data(), host.size() * sizeof(std::int32_t), to);
  }
  virtual void zero(void* to, std::size_t bytes) = 0;
  // An Error that names the tensor, unless the call's device reaches its memory.
  virtual void require_reachable(const char* name, const Tensor&) = 0;
  // to = from, or to += from, in f32 or wider. Tensors have rank 4 and equal sizes. A copy may be
  // between equal types, bool among them; else `from` is f32, or f64 for f64.
  virtual void write(const Tensor& from, const Tensor& to, bool add) = 0;
};

inline constexpr std::size_t kAlignment = 256;  // of the parts of a workspace

// Memory that does not exist yet, where no caller's tensor lies: for checks of a call.
inline std::byte* unmade_memory() { return reinterpret_cast<std::byte*>(std::uintptr_t(1) << 62); }

// An Error where a given workspace is too small, or none can be allocated. On a GPU the call's
// context is current while the memory lives, and work is put on the call's stream.
std::unique_ptr<Memory> host_memory(std::size_t bytes, const Run&);
std::unique_ptr<Memory> device_memory(std::size_t bytes, const Run&);

}  // namespace regard::distributed
