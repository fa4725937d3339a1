// Validation of the tables of sequences.
#include "problem/sequence_tables.hpp"

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
