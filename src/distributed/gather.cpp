// The two passes: keys come in the order of the sequence, one call computes all of the rank's rows,
// and sums of dk and dv return to the owners of the keys.
//
// Keys come again for the backward pass, so that a rank keeps no more than its own between the two.
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "distributed/memory.hpp"
#include "distributed/part.hpp"
#include "distributed/ranks.hpp"
#include "distributed/visibility.hpp"
#include "problem/refuse.hpp"
#include "regard/distributed.hpp"
#include "threads/float_state.hpp"

namespace regard::distributed {
namespace {

constexpr Part::Half kHalves[] = {Part::Half::keys, Part::Half::values};

Tensor from_row(Tensor x, std::int64_t first, std::int64_t count) {
  x.sizes[2] = count;
  if (first > 0) {
    x.data = static_cast<std::byte*>(x.data) + first * x.strides[2] * std::int64_t(size_of(x.type));
  }
  return x;
}

// One call of one rank, once its arguments are known to be right.
class Pass {
 public:
  Pass(const Part& part, const Collectives& ranks, const Run& run, Memory& memory)
      : part_(part),
        ranks_(ranks),
        run_(run),
        memory_(memory),
        keys_(memory.workspace() + part.layout().keys),
        sums_(memory.workspace() + part.layout().sums),
        parts_(memory.workspace() + part.layout().parts) {}

  // The call over the keys of all ranks that this one needs.
  Attention with_keys(const Attention& a) {
    place_own(a);
    receive_keys();
    const PartLayout& at = part_.layout();
    std::byte* const workspace = memory_.workspace();
    const auto& positions = part_.positions();
    const auto& spans = part_.spans();
    return part_.gathered(
        workspace,
        memory_.table(positions.data(), positions.size() * sizeof(std::int32_t),
                      workspace + at.positions),
        memory_.table(spans.data(), spans.size() * sizeof(std::int32_t), workspace + at.spans));
  }

  // What the call adds to, or does not write.
  void clear_sums(const Gradients& to) {
    const Summed& summed = part_.summed();
    if (summed.keys() && (to.accumulate || !summed.dk || !summed.dv)) {
      memory_.zero(sums_, bytes_of(part_.keys(), part_.sum_type()));
    }
    if (summed.dsink && to.accumulate) memory_.zero(sink_of(part_.rank()), sink_bytes());
  }

  void sum_over_ranks(const Gradients& to) {
    exchange(ranks_, sum_messages(), run_.stream);
    if (part_.summed().keys()) sum_keys(to);
    if (part_.summed().dsink) sum_sinks(to);
  }

 private:
  std::size_t bytes_of(const Rows& rows, Type type) const {
    return std::size_t((rows.end - rows.begin) * part_.row_bytes(type));
  }
  // Where a key of the sequence lies in `keys` or `sums`.
  std::byte* at(std::byte* memory, std::int64_t key, Type type) const {
    return memory + (key - part_.keys().begin) * part_.row_bytes(type);
  }
  Tensor view(std::byte* memory, const Rows& rows, Type type, Part::Half half) const {
    return part_.rows_at(memory, type, rows.end - rows.begin, half);
  }

  void place_own(const Attention& a) {
    std::int64_t first = 0;
    for (const Rows& run : part_.own_runs()) {
      for (const Part::Half half : kHalves) {
        const Tensor& own = half == Part::Half::keys ? a.k : a.v;
        memory_.write(from_row(own, first, run.end - run.begin),
                      view(at(keys_, run.begin, part_.type()), run, part_.type(), half), false);
      }
      first += run.end - run.begin;
    }
    for (const Rows& gap : part_.gaps()) {
      memory_.zero(at(keys_, gap.begin, part_.type()), bytes_of(gap, part_.type()));
    }
  }

  void receive_keys() {
    Messages messages;
    const Type type = part_.type();
    if (part_.row_bytes(type) == 0) return;
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        messages.sends.push_back({other, at(keys_, run.begin, type), bytes_of(run, type)});
      }
      for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
        messages.receives.push_back({other, at(keys_, run.begin, type), bytes_of(run, type)});
      }
    }
    exchange(ranks_, messages, run_.stream);
  }

  Messages sum_messages() const {
    Messages messages;
    const Type type = part_.sum_type();
    std::byte* to = parts_;
    for (int other = 0; other < ranks_.size; ++other) {
      if (other == ranks_.rank) continue;
      if (part_.summed().keys() && part_.row_bytes(type) > 0) {
        for (const Rows& run : part_.plan().runs(other, ranks_.rank)) {
          messages.sends.push_back({other, at(sums_, run.begin, type), bytes_of(run, type)});
        }
        for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
          messages.receives.push_back({other, to, bytes_of(run, type)});
          to += bytes_of(run, type);
        }
      }
      if (part_.summed().dsink) {
        messages.sends.push_back({other, sink_of(ranks_.rank), sink_bytes()});
        messages.receives.push_back({other, sink_of(other), sink_bytes()});
      }
    }
    return messages;
  }

  // In the order of ranks, this one among them.
  void sum_keys(const Gradients& to) {
    const Type type = part_.sum_type();
    std::byte* const totals = memory_.workspace() + part_.layout().totals;
    const Rows all{0, part_.plan().rows(ranks_.rank)};
    memory_.zero(totals, bytes_of(all, type));
    const std::byte* came = parts_;
    for (int other = 0; other < ranks_.size; ++other) {
      for (const Rows& run : part_.plan().runs(ranks_.rank, other)) {
        const bool is_own = other == ranks_.rank;
        add_part(is_own ? at(sums_, run.begin, type) : came, run, totals);
        if (!is_own) came += bytes_of(run, type);
      }
    }
    const Summed& summed = part_.summed();
    const auto write = [&](Part::Half half, const Tensor& gradient) {
      memory_.write(view(totals, all, type, half), gradient, to.accumulate);
    };
    if (summed.dk) write(Part::Half::keys, to.dk);
    if (summed.dv) write(Part::Half::values, to.dv);
  }

  void add_part(const std::byte* from, const Rows& run, std::byte* totals) {
    const Type type = part_.sum_type();
    const auto& own = part_.plan().blocks[std::size_t(ranks_.rank)];
    const auto block = std::lower_bound(own.begin(), own.end(), run.begin / kBlock);
    const std::int64_t first = (block - own.begin()) * kBlock;  // its local row
    std::byte* const sum = totals + first * part_.row_bytes(type);
    for (const Part::Half half : kHalves) {
      memory_.write(view(const_cast<std::byte*>(from), run, type, half), view(sum, run, type, half),
                    true);
    }
  }

  std::size_t sink_bytes() const { return std::size_t(part_.plan().whole.heads_q) * sizeof(float); }
  std::byte* sink_of(int rank) const {
    return memory_.workspace() + part_.layout().sinks + std::size_t(rank) * sink_bytes();
  }

  void sum_sinks(const Gradients& to) {
    const std::int64_t heads = part_.plan().whole.heads_q;
    const auto row = [&](void* data, std::int64_t stride) {
      return Tensor{data, Type::f32, {1, heads, 1, 1}, {0, stride, 0, 1}};
    };
    std::byte* const total = sink_of(ranks_.size);
    for (int rank = 0; rank < ranks_.size; ++rank) {
      memory_.write(row(sink_of(rank), 1), row(total, 1), rank > 0);
    }
    memory_.write(row(total, 1), row(to.dsink.data, to.dsink.strides[0]), to.accumulate);
  }

  const Part& part_;
  const Collectives& ranks_;
  const Run& run_;
  Memory& memory_;
  std::byte *keys_, *sums_, *parts_;
};

std::unique_ptr<Memory> memory_for(const Part& part, const Run& run) {
  const auto bytes = std::size_t(part.workspace());
  return run.device.kind == Device::Kind::cpu ? host_memory(bytes, run) : device_memory(bytes, run);
}

// Of all tensors, before anything is sent.
void require_reachable(Memory& memory,
                       std::initializer_list<std::pair<const char*, const Tensor&>> tensors) {
  for (const auto& [name, tensor] : tensors) memory.require_reachable(name, tensor);
}

}  // namespace

void forward(const Attention& a, const ForwardOutputs& to, const Plan& plan,
             const Collectives& ranks, const Run& run) {
  const DefaultFloatState floats;
  std::unique_ptr<Part> part;
  std::unique_ptr<Memory> memory;
  check_collectives(ranks, plan.ranks());
  agree(ranks, [&] {
    check_memory(ranks, run);
    part = std::make_unique<Part>(a, plan, ranks.rank, run);
    part->describe_forward(to);
    memory = memory_for(*part, run);
    require_reachable(*memory, {{"q", a.q},
                                {"k", a.k},
                                {"v", a.v},
                                {"bias", a.bias},
                                {"mask", a.mask},
                                {"alibi_slopes", a.alibi_slopes},
                                {"sink", a.sink},
                                {"out", to.out},
                                {"lse", to.lse}});
    return part->facts();
  });
  Pass pass(*part, ranks, run, *memory);
  const Attention whole = pass.with_keys(a);
  regard::forward(whole, to, part->inner(memory->workspace()));
}

void backward(const Attention& a, const BackwardInputs& from, const Gradients& to, const Plan& plan,
              const Collectives& ranks, const Run& run) {
  const DefaultFloatState floats;
  std::unique_ptr<Part> part;
  std::unique_ptr<Memory> memory;
  check_collectives(ranks, plan.ranks());
  agree(ranks, [&] {
    check_memory(ranks, run);
    part = std::make_unique<Part>(a, plan, ranks.rank, run);
    part->describe_backward(from, to);
    memory = memory_for(*part, run);
    require_reachable(*memory, {{"q", a.q},
                                {"k", a.k},
                                {"v", a.v},
                                {"bias", a.bias},
                                {"mask", a.mask},
                                {"alibi_slopes", a.alibi_slopes},
                                {"sink", a.sink},
                                {"out", from.out},
                                {"lse", from.lse},
                                {"dout", from.dout},
                                {"dlse", from.dlse},
                                {"delta", from.delta},
                                {"dq", to.dq},
                                {"dk", to.dk},
                                {"dv", to.dv},
                                {"dbias", to.dbias},
                                {"dsink", to.dsink}});
    return part->facts();
  });
  Pass pass(*part, ranks, run, *memory);
  const Attention whole = pass.with_keys(a);
  pass.clear_sums(to);
  regard::backward(whole, from, part->gathered(memory->workspace(), to),
                   part->inner(memory->workspace()));
  pass.sum_over_ranks(to);
}

std::size_t workspace(const Attention& a, const ForwardOutputs& to, const Plan& plan, int rank,
                      const Run& run) {
  Part part(a, plan, rank, run);
  part.describe_forward(to);
  return std::size_t(part.workspace());
}

std::size_t workspace(const Attention& a, const BackwardInputs& from, const Gradients& to,
                      const Plan& plan, int rank, const Run& run) {
  Part part(a, plan, rank, run);
  part.describe_backward(from, to);
  return std::size_t(part.workspace());
}

}  // namespace regard::distributed
