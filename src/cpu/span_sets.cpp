#include "cpu/span_sets.hpp"

#include <algorithm>

#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// The tree of one query head's row spans or key spans.
struct Tree {
  bool of_keys = false;
  int64 b = 0;
  int64 h = 0;
  int64 blocks = 0;
  int64 leaves = 0;
  int64 first = 0;  // of the sets of all trees
};

// Forward, a task reads the spans of its own rows once; backward, each chunk of keys would.
bool wants_rows(const Problem& p) { return p.backward && p.features.row_spans; }

class Trees {
 public:
  Trees(const Problem& p, const CpuTiling& tiling, const Batch& batch)
      : p_(p), tiling_(tiling), batch_(batch) {}

  const std::vector<Tree>& list() const { return list_; }
  int64 size() const { return size_; }

  // Adds those of row spans or of key spans; returns the number of each head's, or -1.
  std::vector<int64> add_all(bool of_keys) {
    const SpanView& spans = of_keys ? p_.key_spans : p_.row_spans;
    std::vector<int64> numbers;
    for (int64 b = 0; b < p_.sizes.batch; ++b) {
      for (int64 h = 0; h < p_.sizes.heads_q; ++h) {
        const bool shares = h > 0 && spans.view.strides.head == 0;
        numbers.push_back(shares ? numbers.back() : add(of_keys, b, h));
      }
    }
    return numbers;
  }

  IntervalSet leaf(const Tree& t, int64 block) const {
    const Sequence& s = batch_[t.b].seq;
    IntervalSet set;
    if (t.of_keys) {
      const Interval keys = p_.backward ? KeyChunks(tiling_, s.len_k).keys(block)
                                        : blocks_of(tiling_.block_k, block, s.len_k);
      for (int64 j = keys.begin; j < keys.end; ++j) {
        add_spans(set, spans_of(p_.key_spans, t.b, t.h, s.first_k, j),
                  visible_queries(p_.mask_params, s, j));
      }
    } else {
      const Interval rows = blocks_of(tiling_.block_q, block, s.len_q);
      for (int64 i = rows.begin; i < rows.end; ++i) {
        add_spans(set, spans_of(p_.row_spans, t.b, t.h, s.first_q, i),
                  visible_keys(p_.mask_params, s, i));
      }
    }
    return set;
  }

 private:
  int64 add(bool of_keys, int64 b, int64 h) {
    const Sequence& s = batch_[b].seq;
    // Panels of one vector (of_one_vector) have fewer rows for all heads than this tiling packs.
    const RowBlocks rows(tiling_, s.len_q, p_.sizes.group());
    if (s.len_q < 1 || s.len_k < 1 || rows.packs_gqa) return -1;  // few rows visit all
    const int64 blocks = of_keys ? key_blocks(s) : rows.per_head();
    list_.push_back({of_keys, b, h, blocks, leaves_for(blocks), size_});
    size_ += 2 * list_.back().leaves;
    return int64(list_.size()) - 1;
  }

  int64 key_blocks(const Sequence& s) const {
    return p_.backward ? KeyChunks(tiling_, s.len_k).count : divide_up(s.len_k, tiling_.block_k);
  }
  static Interval blocks_of(int64 size, int64 block, int64 length) {
    return {block * size, std::min((block + 1) * size, length)};
  }

  const Problem& p_;
  const CpuTiling& tiling_;
  const Batch& batch_;
  std::vector<Tree> list_;
  int64 size_ = 0;
};

// Leaves that one worker makes at once.
struct Leaves {
  const Tree* tree;
  Interval blocks;
};

std::vector<Leaves> shares_of(const std::vector<Tree>& trees) {
  constexpr int64 kLeaves = 16;
  std::vector<Leaves> shares;
  for (const Tree& tree : trees) {
    for (int64 block = 0; block < tree.blocks; block += kLeaves) {
      shares.push_back({&tree, {block, std::min(block + kLeaves, tree.blocks)}});
    }
  }
  return shares;
}

}  // namespace

SpanSets::SpanSets(const Problem& p, const CpuTiling& tiling, const Batch& batch, int workers,
                   const Run& run)
    : heads_q_(p.sizes.heads_q), group_(p.sizes.group()) {
  if (!wants_rows(p) && !p.features.key_spans) return;
  Trees trees(p, tiling, batch);
  std::vector<int64> of_rows, of_keys;
  if (wants_rows(p)) of_rows = trees.add_all(false);
  if (p.features.key_spans) of_keys = trees.add_all(true);
  sets_.resize(std::size_t(trees.size()));
  const std::vector<Leaves> shares = shares_of(trees.list());
  parallel_tasks(int64(shares.size()), workers, run, [&](int64 n, int) {
    const auto& [tree, blocks] = shares[std::size_t(n)];
    for (int64 block = blocks.begin; block < blocks.end; ++block) {
      sets_[std::size_t(tree->first + tree->leaves + block)] = trees.leaf(*tree, block);
    }
  });
  parallel_tasks(int64(trees.list().size()), workers, run, [&](int64 t, int) {
    const Tree& tree = trees.list()[std::size_t(t)];
    IntervalSet* const sets = sets_.data() + tree.first;
    for (int64 n = tree.leaves - 1; n > 0; --n) {
      sets[n].add(sets[2 * n]);
      sets[n].add(sets[2 * n + 1]);
    }
  });
  const auto sets_of = [&](const std::vector<int64>& numbers, std::size_t head) -> BlockSets<> {
    if (numbers.empty() || numbers[head] < 0) return {};
    const Tree& tree = trees.list()[std::size_t(numbers[head])];
    return {sets_.data() + tree.first, tree.leaves};
  };
  const auto heads = std::size_t(batch.size() * heads_q_);
  for (std::size_t n = 0; n < heads; ++n)
    reach_.push_back({sets_of(of_rows, n), sets_of(of_keys, n)});
}

}  // namespace regard::cpu_backend
