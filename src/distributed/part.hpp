// One rank's part of a call: its tensors, checked; its place in memory; and the call of Regard that
// it makes over the keys that it has received.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distributed/plan_contents.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

// Offsets in the workspace, each a multiple of kAlignment.
struct PartLayout {
  std::int64_t keys = 0;       // (keys, B, Hkv, D + Dv): the received keys with their values
  std::int64_t positions = 0;  // of own rows, where a GPU reads them
  std::int64_t spans = 0;      // of documents, likewise
  std::int64_t sums = 0;       // (keys, B, Hkv, D + Dv): this rank's dk and dv for these keys
  std::int64_t parts = 0;      // (rows that other ranks need, ...): theirs for own keys
  std::int64_t totals = 0;     // (rows, B, Hkv, D + Dv): sums over ranks
  std::int64_t sinks = 0;      // (ranks + 1, Hq): dsink of each rank, and their sum
  std::int64_t call = 0;       // the workspace of the call
  std::int64_t size = 0;
};

// What a backward pass sums over ranks.
struct Summed {
  bool dk = false;
  bool dv = false;
  bool dsink = false;
  bool keys() const { return dk || dv; }
};

class Part {
 public:
  // Errors name the argument. Nothing is read or written yet.
  Part(const Attention&, const Plan&, int rank, const Run&);

  // Each checks the whole call, and knows the layout then.
  void describe_forward(const ForwardOutputs&);
  void describe_backward(const BackwardInputs&, const Gradients&);
  std::int64_t workspace() const { return layout_.size; }
  const PartLayout& layout() const { return layout_; }
  const Summed& summed() const { return summed_; }

  // What has to be equal on all ranks.
  std::string facts() const;

  // The call over the received keys in a workspace. The tables are where kernels read them.
  Attention gathered(std::byte* workspace, const void* positions, const void* spans) const;
  Gradients gathered(std::byte* workspace, const Gradients&) const;
  Run inner(std::byte* workspace) const;

  const PlanContents& plan() const { return plan_; }
  int rank() const { return rank_; }
  const Rows& keys() const { return keys_; }  // the range that the call has
  std::vector<Rows> own_runs() const { return plan_.runs(rank_, rank_); }
  std::vector<Rows> gaps() const;  // of keys that no row needs
  const std::vector<std::int32_t>& spans() const { return spans_; }
  const std::vector<std::int32_t>& positions() const {
    return plan_.first_positions[std::size_t(rank_)];
  }

  Type type() const { return a_.q.type; }
  Type sum_type() const { return type() == Type::f64 ? Type::f64 : Type::f32; }
  // Of one key and its value, for all batch entries and heads.
  std::int64_t row_bytes(Type type) const;
  // n rows of keys or of values, (B, Hkv, n, D or Dv), in memory of (n, B, Hkv, D + Dv).
  enum class Half : bool { keys, values };
  Tensor rows_at(void* memory, Type, std::int64_t n, Half) const;

 private:
  void check_options() const;
  void check_rows() const;
  Attention checked_locally() const;
  void make_spans();
  void lay_out();

  const Attention a_;
  const PlanContents& plan_;
  const int rank_;
  const Run& run_;
  const std::int64_t rows_;
  Rows keys_;
  Summed summed_{};
  bool is_backward_ = false;
  std::vector<std::int32_t> spans_{};
  PartLayout layout_{};
};

}  // namespace regard::distributed
