// Validation of the tables of sequences.
#include "problem/sequence_tables.hpp"

#include <limits>

#include "problem/refuse.hpp"
#include "problem/tensor_checks.hpp"

namespace regard {
namespace {

void check_table(const char* name, const Tensor& tensor, std::int64_t size) {
  if (!tensor.given()) return;
  require(tensor.type == i32, name, tensor, "must be i32");
  check_shape(name, tensor, 1, "must have one dimension");
  if (tensor.sizes[0] != size) {
    refuse(name, tensor, "must have " + std::to_string(size) + " elements");
  }
  check_last_stride(name, tensor);
}

void check_begins(const char* name, const int32* begins, std::int64_t batch, std::int64_t rows,
                  std::int64_t longest) {
  const auto refuse_entry = [&](std::int64_t b, const std::string& reason) {
    const std::string entry = std::string(name) + "[" + std::to_string(b) + "]";
    refuse(entry.c_str(), begins[b], reason);
  };
  if (begins[0] < 0) refuse_entry(0, "must not be negative");
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = std::int64_t(begins[b + 1]) - begins[b];
    if (length < 0) {
      refuse_entry(b + 1, "must not be below the entry before it, " + std::to_string(begins[b]));
    }
    if (length > longest) {
      refuse_entry(b + 1, "makes a sequence longer than max_seqlen, " + std::to_string(longest));
    }
  }
  if (begins[batch] > rows) {
    refuse_entry(batch, "runs past the end of the packed rows, " + std::to_string(rows));
  }
}

void check_used(const char* name, const int32* used, const int32* begins, std::int64_t batch,
                std::int64_t longest) {
  for (std::int64_t b = 0; used && b < batch; ++b) {
    const std::int64_t room = begins ? begins[b + 1] - begins[b] : longest;
    if (used[b] >= 0 && used[b] <= room) continue;
    const std::string entry = std::string(name) + "[" + std::to_string(b) + "]";
    refuse(entry.c_str(), used[b],
           "must be between 0 and the sequence's length, " + std::to_string(room));
  }
}

std::int64_t position_blocks(const Sizes& s) { return divide_up(s.len_q, kPositionBlock); }

void check_position_table(const Tensor& t, const Sizes& s, bool packed) {
  constexpr const char* kName = "q_positions";
  require(!packed, kName, t, "is not for packed sequences");
  require(t.type == i32, kName, t, "must be i32");
  require(t.rank >= 0, kName, t, "needs as many strides as sizes");
  require(t.rank == 1 || t.rank == 2, kName, t, "must have one dimension or two");
  check_shape(kName, t, t.rank, "(ceil(Sq / 128)) or (B, ceil(Sq / 128))");
  const std::size_t last = rank_of(t) - 1;
  if (t.sizes[last] != position_blocks(s)) {
    refuse(kName, t,
           "must have " + std::to_string(position_blocks(s)) + " positions, one for each 128 rows");
  }
  require(t.rank == 1 || t.sizes[0] == s.batch, kName, t, "must have q's batch size");
  require(t.sizes[last] <= 1 || t.strides[last] == 1, kName, t, "the last stride must be 1");
}

// Checks one sequence's positions. `entry`: prefix of the index in an error's name.
void check_positions(const int32* rows, const Sizes& s, const std::string& entry) {
  const auto refuse_entry = [&](std::int64_t n, const std::string& reason) {
    refuse(("q_positions[" + entry + std::to_string(n) + "]").c_str(), rows[n], reason);
  };
  for (std::int64_t n = 0; n < position_blocks(s); ++n) {
    const std::int64_t least = n > 0 ? std::int64_t(rows[n - 1]) + kPositionBlock : 0;
    if (rows[n] < least) {
      refuse_entry(
          n, n > 0 ? "must be at least 128 above the one before, " + std::to_string(rows[n - 1])
                   : "must not be negative");
    }
    const std::int64_t own = std::min(kPositionBlock, s.len_q - n * kPositionBlock);
    if (rows[n] > std::numeric_limits<int32>::max() - own + 1) {
      refuse_entry(n, "puts a row at or above 2^31");
    }
  }
}

// The numbers that are added to keys, batch entries and heads.
void read_origins(const Attention& a, const Sizes& s, bool packed, Positions& to) {
  const auto read = [](const char* name, std::int64_t value, std::int64_t size, auto& origin) {
    const std::int64_t most = (std::int64_t(1) << 31) - std::max<std::int64_t>(size, 1);
    require(value >= 0 && value <= most, name, value,
            "must not be negative, and put nothing of the call at or above 2^31");
    origin = std::remove_reference_t<decltype(origin)>(value);
  };
  read("k_position", a.k_position, s.len_k, to.first_key);
  read("batch_begin", a.batch_begin, s.batch, to.first_batch);
  read("head_begin", a.head_begin, s.heads_q, to.first_head);
  require(!packed || a.k_position == 0, "k_position", a.k_position, "is not for packed sequences");
  require(a.dropout.p == 0 || a.k_position % 32 == 0, "k_position", a.k_position,
          "must be a multiple of 32 under dropout");
}

// From the caller's memory into the call's own, dense.
void copy_positions(const Sizes& s, std::int64_t entries, bool of_each, TableCopies& copies,
                    SequenceTable& table) {
  const std::int64_t blocks = position_blocks(s);
  std::vector<int32> dense;
  for (std::int64_t b = 0; b < entries; ++b) {
    const int32* const own = table.positions.rows + b * table.position_stride;
    dense.insert(dense.end(), own, own + blocks);
    check_positions(dense.data() + b * blocks, s, of_each ? std::to_string(b) + ", " : "");
  }
  if (table.position_stride != 0) table.position_stride = blocks;
  table.positions.rows = copies.copy(dense.data(), std::int64_t(dense.size()));
}

// `readable`: the host reads the rows' positions.
void read_positions(const Attention& a, const Sizes& s, bool packed, TableCopies* copies,
                    bool readable, SequenceTable& table) {
  read_origins(a, s, packed, table.positions);
  table.has_row_positions = a.q_positions.given();
  table.positions.given = table.has_row_positions || a.k_position != 0;
  require(!table.positions.given || a.causal != Causal::bottom_right, "causal", "bottom_right",
          "needs the ends of the whole sequence, which a part with positions does not have");
  if (!table.has_row_positions) return;
  const Tensor& t = a.q_positions;
  check_position_table(t, s, packed);
  if (!readable) return;
  check_data("q_positions", t);
  const bool is_shared = t.rank == 1 || t.strides[0] == 0;
  const std::int64_t entries = t.rank == 1 ? 1 : is_shared ? std::min<int64>(s.batch, 1) : s.batch;
  table.position_stride = is_shared ? 0 : t.strides[0];
  table.positions.rows = static_cast<const int32*>(t.data);
  if (copies) copy_positions(s, entries, t.rank == 2, *copies, table);
}

}  // namespace

const int32* TableCopies::copy(const int32* table, std::int64_t size) {
  std::vector<int32>& own = tables_[count_++];
  own.assign(table, table + size);
  return own.data();
}

SequenceTable read_sequences(const Attention& a, const Sizes& s, bool packed, NullData nulls,
                             TableCopies* copies) {
  SequenceTable table{.len_q = s.len_q, .len_k = s.len_k};
  struct Given {
    const char* name;
    const Tensor& tensor;
    std::int64_t size;
    const int32*& to;
  };
  const Given all[] = {{"cu_seqlens_q", a.cu_seqlens_q, s.batch + 1, table.begins_q},
                       {"cu_seqlens_k", a.cu_seqlens_k, s.batch + 1, table.begins_k},
                       {"seqused_q", a.seqused_q, s.batch, table.used_q},
                       {"seqused_k", a.seqused_k, s.batch, table.used_k}};
  if (packed) {
    require(a.cu_seqlens_k.given(), "cu_seqlens_k", a.cu_seqlens_k,
            "must be given with cu_seqlens_q");
  }
  bool readable = copies != nullptr;
  for (const Given& given : all) {
    check_table(given.name, given.tensor, given.size);
    readable = readable && (!given.tensor.given() || given.tensor.data);
  }
  const bool reads_positions = nulls != NullData::allowed || (copies && a.q_positions.data);
  read_positions(a, s, packed, copies, reads_positions, table);
  if (nulls == NullData::allowed && !readable) return table;
  for (const Given& given : all) {
    if (!given.tensor.given()) continue;
    check_data(given.name, given.tensor);
    const auto* const data = static_cast<const int32*>(given.tensor.data);
    given.to = copies ? copies->copy(data, given.size) : data;
  }
  if (!copies) return table;
  if (packed) {
    check_begins("cu_seqlens_q", table.begins_q, s.batch, s.rows_q, s.len_q);
    check_begins("cu_seqlens_k", table.begins_k, s.batch, s.rows_k, s.len_k);
  }
  check_used("seqused_q", table.used_q, table.begins_q, s.batch, s.len_q);
  check_used("seqused_k", table.used_k, table.begins_k, s.batch, s.len_k);
  return table;
}

}  // namespace regard
