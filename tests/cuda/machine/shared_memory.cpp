// Shared memory, copies into it, and the warp's instructions on matrices.
#include <cstring>

#include "block_machine.hpp"
#include "request.hpp"

namespace regard::emulated {

// --------------------------------------------------------------------------------- who may access

// Of one block of the cluster.
bool BlockMachine::is_shared(uint32 address, int64 bytes) const {
  const uint32 block = launch_.cluster > 1 ? address / stride_ : 0;
  return int(block) < launch_.cluster && address - block * stride_ + bytes <= launch_.shared_bytes;
}

void BlockMachine::check_range(uint32 address, int bytes, const char* what, Where where) {
  if (!is_shared(address, bytes)) {
    const uint32 in_block = launch_.cluster > 1 ? address % stride_ : address;
    fail_at(thread, where, "%s bytes %u to %u of %lld of shared memory", what, in_block,
            in_block + bytes, static_cast<long long>(launch_.shared_bytes));
  }
  if (address % uint32(bytes) != 0) {
    fail_at(thread, where, "%s shared byte %u, which is not a multiple of %d", what, address,
            bytes);
  }
}

// Two threads touch a word, one of them to write it: between the two must lie a barrier of the
// block, or one of the warp where both are in it. `by` is -1 where the whole warp reads.
void BlockMachine::note_read(SharedWord& word, uint32 address, int by, int warp_index,
                             Where where) {
  if (word.copying >= 0) {
    fail_at(thread, where, "reads shared byte %u while a copy of thread %d is under way to it",
            address, int(word.copying));
  }
  const std::uint32_t now_in_warp = warps_[warp_index].epoch;
  if (word.written_in == epoch_ && word.writer != by) {
    const bool same_warp = word.writer / 32 == warp_index;
    if (!same_warp || word.written_in_warp == now_in_warp) {
      fail_at(thread, where,
              "reads shared byte %u, which thread %d has written, without a %s "
              "between",
              address, int(word.writer), same_warp ? "sync_warp" : "sync_block");
    }
  }
  if (word.read_in != epoch_) {
    word.read_in = epoch_;
    word.reader = std::int16_t(warp_index * 32 + (by < 0 ? 0 : by % 32));
    word.read_in_warp = now_in_warp;
    word.read_by_lanes = by < 0;
    word.read_by_warps = false;
  } else if (word.reader / 32 != warp_index) {
    word.read_by_warps = true;
  } else if (word.read_in_warp != now_in_warp) {
    word.read_in_warp = now_in_warp;
    word.reader = std::int16_t(warp_index * 32 + (by < 0 ? 0 : by % 32));
    word.read_by_lanes = by < 0;
  } else if (word.reader != by) {
    word.read_by_lanes = true;
  }
}

void BlockMachine::note_write(SharedWord& word, uint32 address, int by, Where where) {
  if (word.copying >= 0) {
    fail_at(by, where, "writes shared byte %u while a copy of thread %d is under way to it",
            address, int(word.copying));
  }
  const std::uint32_t now_in_warp = warps_[by / 32].epoch;
  if (word.written_in == epoch_ && word.writer != by) {
    const bool same_warp = word.writer / 32 == by / 32;
    if (!same_warp || word.written_in_warp == now_in_warp) {
      fail_at(by, where,
              "writes shared byte %u, which thread %d has written, without a %s "
              "between",
              address, int(word.writer), same_warp ? "sync_warp" : "sync_block");
    }
  }
  if (word.read_in == epoch_) {
    const bool same_warp = !word.read_by_warps && word.reader / 32 == by / 32;
    const bool self = same_warp && !word.read_by_lanes && word.reader == by;
    if (!same_warp || (word.read_in_warp == now_in_warp && !self)) {
      fail_at(by, where, "writes shared byte %u, which thread %d has read, without a %s between",
              address, int(word.reader), same_warp ? "sync_warp" : "sync_block");
    }
  }
  word.written_in = epoch_;
  word.written_in_warp = now_in_warp;
  word.writer = std::int16_t(by);
}

void BlockMachine::note(uint32 address, int bytes, Access access, int by, Where where) {
  for (int i = 0; i < bytes; i += 4) {
    SharedWord& word = words_[(address + i) / 4];
    if (access == Access::read) {
      note_read(word, address + i, by, by / 32, where);
    } else {
      note_write(word, address + i, by, where);
    }
  }
}

void* BlockMachine::shared_memory(int64 bytes, Where where) {
  if (bytes > launch_.shared_bytes) {
    fail_at(thread, where, "uses %lld bytes of shared memory, was given %lld",
            static_cast<long long>(bytes), static_cast<long long>(launch_.shared_bytes));
  }
  return shared_.get() + rank() * stride_;
}

uint32 BlockMachine::shared_address(const void* pointer, Where where) {
  const auto offset = static_cast<const unsigned char*>(pointer) - shared_.get();
  const auto own = offset - std::int64_t(rank() * stride_);
  if (own < 0 || own > launch_.shared_bytes) {
    fail_at(thread, where, "takes the shared address of what is not in shared memory");
  }
  return uint32(offset);
}

uint32 BlockMachine::address_in_cluster(uint32 own, int block, Where where) {
  if (block < 0 || block >= launch_.cluster) fail_at(thread, where, "no such block");
  return own % stride_ + block * stride_;
}

void* BlockMachine::shared_at(uint32 address, int bytes, Access access, Where where) {
  check_range(address, bytes, access == Access::read ? "reads" : "writes", where);
  note(address, bytes, access, thread, where);
  return shared_.get() + address;
}

void BlockMachine::check_aligned(const void* pointer, int bytes, Where where) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % std::uintptr_t(bytes) != 0) {
    fail_at(thread, where,
            "accesses %d bytes of global memory at an address that is not a "
            "multiple of as many",
            bytes);
  }
}

// ----------------------------------------------------------------------------------------- copies

void BlockMachine::copy(uint32 to, const void* from, int bytes, int valid, bool asynchronous,
                        Where where) {
  if (valid < 0 || valid > bytes) {
    fail_at(thread, where, "copies %d bytes of %d", valid, bytes);
  }
  check_range(to, bytes, "copies to", where);
  note(to, bytes, Access::write, thread, where);
  PendingCopy pending{.to = to, .bytes = bytes, .group = threads_[thread]->groups, .data = {}};
  if (valid > 0) {
    check_aligned(from, bytes, where);
    std::memcpy(pending.data, from, valid);
  }
  unsigned char* const destination = shared_.get() + to;
  if (!asynchronous) {
    std::memcpy(destination, pending.data, bytes);
    return;
  }
  std::memset(destination, 0xff, bytes);
  for (int i = 0; i < bytes; i += 4) words_[(to + i) / 4].copying = std::int16_t(thread);
  threads_[thread]->copies.push_back(pending);
}

void BlockMachine::cp_async_commit() { ++threads_[thread]->groups; }

void BlockMachine::cp_async_wait(int pending, Where where) {
  Thread& t = *threads_[thread];
  std::size_t done = 0;
  for (; done < t.copies.size() && t.copies[done].group < t.groups - pending; ++done) {
    const PendingCopy& copy = t.copies[done];
    for (int i = 0; i < copy.bytes; i += 4) words_[(copy.to + i) / 4].copying = -1;
    note(copy.to, copy.bytes, Access::write, thread, where);
    std::memcpy(shared_.get() + copy.to, copy.data, copy.bytes);
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + done);
}

// ---------------------------------------------------------------------------- of all lanes at once

void BlockMachine::perform_shuffle(Warp& warp) {
  for (Request* r : warp.request) r->received = warp.request[r->from]->bits;
}

// PTX ISA, ldmatrix: lane l gives row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the
// next of row l / 4 of each matrix; of column l / 4 where it is transposed.
void BlockMachine::perform_load(Warp& warp) {
  uint16 matrix[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Request& r = *warp.request[lane];
    thread = thread / 32 * 32 + lane;  // of whom a fault speaks
    check_range(r.row, 16, "ldmatrix reads", r.where);
    for (int i = 0; i < 16; i += 4) {
      note_read(words_[(r.row + i) / 4], r.row + i, -1, thread / 32, r.where);
    }
    std::memcpy(matrix[lane / 8][lane % 8], shared_.get() + r.row, 16);
  }
  thread = thread / 32 * 32 + warp.next_lane;
  const bool transposed = warp.request[0]->value;
  for (int lane = 0; lane < 32; ++lane) {
    Request& r = *warp.request[lane];
    const int row = lane / 4, column = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const uint32 low = transposed ? matrix[m][column][row] : matrix[m][row][column];
      const uint32 high = transposed ? matrix[m][column + 1][row] : matrix[m][row][column + 1];
      (*r.matrices)[m] = low | high << 16;
    }
  }
}

namespace {

float of_f16(uint32 bits) {
  const uint32 sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
  if (size >= 0x0f800000) return __builtin_bit_cast(float, sign | 0x70000000 | size);
  const float scaled = __builtin_bit_cast(float, size) * 0x1p112f;
  return sign ? -scaled : scaled;
}

float element(Format format, uint32 word, int half) {
  const uint32 bits = half ? word >> 16 : word & 0xffff;
  return format == Format::f16 ? of_f16(bits) : __builtin_bit_cast(float, bits << 16);
}

float of_tf32(uint32 word) { return __builtin_bit_cast(float, word & ~0x1fffu); }

}  // namespace

// PTX ISA, the fragments of m16n8k16 (f16, bf16) and m16n8k8 (tf32). With g = lane / 4 and
// c = lane % 4: d0, d1 = D[g][2c, 2c + 1], d2, d3 the same of row g + 8. 16 bits: a0, a1 =
// A[g, g + 8][2c, 2c + 1], a2, a3 the same 8 columns on; b0 = B[2c, 2c + 1][g], b1 8 rows on.
// tf32: a0, a1 = A[g, g + 8][c], a2, a3 4 columns on; b0 = B[c][g], b1 = B[c + 4][g].
void BlockMachine::perform_multiply(Warp& warp) {
  const Format format = warp.request[0]->format;
  const int depth = format == Format::tf32 ? 8 : 16;
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Request& r = *warp.request[lane];
    const int g = lane / 4, c = lane % 4;
    for (int w = 0; w < 4; ++w) {
      const int row = g + w % 2 * 8;
      if (format == Format::tf32) {
        a[row][c + w / 2 * 4] = of_tf32((*r.a)[w]);
        if (w < 2) b[c + w * 4][g] = of_tf32(r.b[w]);
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        a[row][2 * c + w / 2 * 8 + half] = element(format, (*r.a)[w], half);
        if (w < 2) b[2 * c + w * 8 + half][g] = element(format, r.b[w], half);
      }
    }
  }
  double d[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < 8; ++column) {
        d[row][column] += double(a[row][k]) * double(b[k][column]);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float(&x)[4] = *warp.request[lane]->d;
    for (int i = 0; i < 4; ++i) {
      x[i] = float(double(x[i]) + d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  }
}

}  // namespace regard::emulated
