// The functions of the API: checks of all ranks before anything is sent, then the scheme's pass.
#include <memory>

#include "distributed/memory.hpp"
#include "distributed/part.hpp"
#include "distributed/ranks.hpp"
#include "distributed/scheme_call.hpp"
#include "problem/refuse.hpp"
#include "regard/distributed.hpp"
#include "threads/float_state.hpp"

namespace regard::distributed {
namespace {

std::unique_ptr<SchemeCall> call_of(const Part& part) {
  switch (part.plan().scheme) {
    case Scheme::ring:
      return ring_call(part);
    case Scheme::ulysses:
      return ulysses_call(part);
    case Scheme::gather:
    case Scheme::halo:
      return gather_call(part);
    case Scheme::automatic:
      break;
  }
  refuse("plan", name_of(part.plan().scheme), "is no scheme of a plan", Code::internal);
}

std::size_t workspace_of(const SchemeCall& call) {
  return std::size_t(call.workspace()) + kAlignment;  // memory of the caller's may begin anywhere
}

std::unique_ptr<Memory> memory_for(const SchemeCall& call, const Run& run) {
  const std::size_t bytes = workspace_of(call);
  return run.device.kind == Device::Kind::cpu ? host_memory(bytes, run) : device_memory(bytes, run);
}

// given: what Part takes before the plan.
template <class... Given>
void run_pass(const Plan& plan, const Collectives& ranks, const Run& run, const Given&... given) {
  const DefaultFloatState floats;
  std::unique_ptr<Part> part;
  std::unique_ptr<SchemeCall> call;
  std::unique_ptr<Memory> memory;
  check_collectives(ranks, plan.ranks());
  agree(ranks, [&] {
    check_memory(ranks, run);
    part = std::make_unique<Part>(given..., plan, ranks.rank, run);
    call = call_of(*part);
    memory = memory_for(*call, run);
    part->require_reachable(*memory);
    return part->facts() + call->facts();
  });
  call->run(ranks, *memory);
}

}  // namespace

void forward(const Attention& a, const ForwardOutputs& to, const Plan& plan,
             const Collectives& ranks, const Run& run) {
  with_memory_errors([&] { run_pass(plan, ranks, run, a, to); });
}

void backward(const Attention& a, const BackwardInputs& from, const Gradients& to, const Plan& plan,
              const Collectives& ranks, const Run& run) {
  with_memory_errors([&] { run_pass(plan, ranks, run, a, from, to); });
}

std::size_t workspace(const Attention& a, const ForwardOutputs& to, const Plan& plan, int rank,
                      const Run& run) {
  return with_memory_errors([&] {
    const Part part(a, to, plan, rank, run);
    return workspace_of(*call_of(part));
  });
}

std::size_t workspace(const Attention& a, const BackwardInputs& from, const Gradients& to,
                      const Plan& plan, int rank, const Run& run) {
  return with_memory_errors([&] {
    const Part part(a, from, to, plan, rank, run);
    return workspace_of(*call_of(part));
  });
}

}  // namespace regard::distributed
