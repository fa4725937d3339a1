// Gather and halo: the calls over the keys that a rank needs, a call for each group of heads, and
// where everything lies in the workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distributed/call_of_heads.hpp"
#include "distributed/key_rows.hpp"
#include "distributed/part.hpp"
#include "distributed/sink_sums.hpp"

namespace regard::distributed {

// Heads that travel and are computed together, and where their keys lie. Offsets in the workspace,
// each a multiple of kAlignment.
struct KeyGroup {
  KeyGroup(const Part&, const Heads& of_keys);

  Heads keys, queries;
  KeyRows rows;
  std::int64_t keys_at = 0;    // (keys, B, heads, D + Dv): the received keys with their values
  std::int64_t sums_at = 0;    // (keys, B, heads, D + Dv): this rank's dk and dv for these keys
  std::int64_t parts_at = 0;   // (rows that other ranks need, ...): theirs for own keys
  std::int64_t totals_at = 0;  // (rows, B, heads, D + Dv): sums over ranks
};

class Gathered {
 public:
  explicit Gathered(const Part&);

  std::int64_t workspace() const { return call_at_ + call_size_; }
  const std::vector<KeyGroup>& groups() const { return groups_; }
  const Rows& keys() const { return keys_; }  // the range that the calls have
  std::vector<Rows> own_runs() const { return part_.plan().runs(part_.rank(), part_.rank()); }
  std::vector<Rows> gaps() const;  // the keys that no row needs

  // The tables are where kernels read them.
  CallOfHeads call(const KeyGroup&, std::byte* workspace, const void* positions,
                   const void* spans) const;
  Run run_in(std::byte* workspace) const { return part_.run_in(workspace + call_at_, call_size_); }

  const std::vector<std::int32_t>& positions() const {
    return part_.plan().first_positions[std::size_t(part_.rank())];
  }
  std::byte* positions_in(std::byte* workspace) const { return workspace + positions_at_; }
  const std::vector<std::int32_t>& spans() const { return spans_; }  // of documents
  std::byte* spans_in(std::byte* workspace) const { return workspace + spans_at_; }
  const SinkSums& sinks() const { return sinks_; }
  std::byte* sinks_in(std::byte* workspace) const { return workspace + sinks_at_; }

 private:
  void lay_out();
  CallOfHeads of_all_heads(std::byte* workspace, const void* positions, const void* spans) const;

  const Part& part_;
  std::vector<KeyGroup> groups_;
  const SinkSums sinks_;
  const Rows keys_;
  const std::vector<std::int32_t> spans_;
  std::int64_t positions_at_ = 0, spans_at_ = 0, sinks_at_ = 0, call_at_ = 0, call_size_ = 0;
};

}  // namespace regard::distributed
