// Hopper's part of the emulated machine: barriers in shared memory, boxes, products of warpgroups.
//
// Everything asynchronous happens as late as it may: a box arrives when somebody waits for its
// barrier, a product is computed when its group is waited for, a stored box is read when its thread
// waits. A wait is taken for a barrier of the whole block, so that races are followed less closely
// than elsewhere.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "block_machine.hpp"
#include "request.hpp"

namespace regard::emulated {
namespace {

constexpr int kPatience = 1 << 20;  // waits in vain, of all threads together, that are a deadlock
constexpr int kPanelColumns = 64, kRowBytes = 128, kGroupBytes = 1024;

// The 128-byte swizzle: bits 4 to 6 of an address take those of the row.
uint32 swizzled(uint32 address) { return address ^ ((address >> 7 & 7) << 4); }

float of_16_bits(Format format, uint16 bits) {
  if (format == Format::bf16) return __builtin_bit_cast(float, uint32(bits) << 16);
  const uint32 sign = uint32(bits & 0x8000) << 16, size = uint32(bits & 0x7fff) << 13;
  if (size >= 0x0f800000) return __builtin_bit_cast(float, sign | 0x70000000 | size);
  const float scaled = __builtin_bit_cast(float, size) * 0x1p112f;
  return sign ? -scaled : scaled;
}

}  // namespace

// -------------------------------------------------------------------------------------- barriers

SharedBarrier& BlockMachine::barrier_at(uint32 address, Where where) {
  const auto found = barriers_.find(address);
  if (found == barriers_.end()) fail("no barrier was made here", where);
  return found->second;
}

void BlockMachine::mbarrier_init(uint32 address, int arrivals, Where where) {
  check_range(address, 8, "makes a barrier of", where);
  if (arrivals <= 0) fail("a barrier without arrivals", where);
  if (barriers_.count(address) > 0) fail("there is a barrier here", where);
  barriers_[address] = {.arrivals = arrivals, .missing = arrivals};
}

void BlockMachine::mbarrier_inval(uint32 address, Where where) {
  if (barrier_at(address, where).bytes != 0) fail("bytes are on their way to a barrier", where);
  barriers_.erase(address);
}

void BlockMachine::end_phase(SharedBarrier& b) {
  if (b.missing > 0 || b.bytes != 0) return;
  b.missing = b.arrivals;
  ++b.phase;
}

void BlockMachine::arrive(uint32 address, int bytes, Where where) {
  SharedBarrier& b = barrier_at(address, where);
  if (b.missing == 0) fail("more arrivals than the barrier's phase has", where);
  --b.missing;
  b.bytes += bytes;
  waits_in_vain_ = 0;
  end_phase(b);
}

void BlockMachine::deliver_boxes(uint32 barrier) {
  for (std::size_t i = 0; i < boxes_.size();) {
    BoxOnItsWay& box = boxes_[i];
    if (box.barrier != barrier) {
      ++i;
      continue;
    }
    std::memcpy(shared_.get() + box.to, box.data.data(), box.data.size());
    std::fill_n(words_.begin() + box.to / 4, box.data.size() / 4, SharedWord{});
    SharedBarrier& b = barriers_[barrier];
    b.bytes -= int64(box.data.size());
    end_phase(b);
    boxes_.erase(boxes_.begin() + i);
  }
}

void BlockMachine::mbarrier_wait(uint32 address, int parity, Where where) {
  SharedBarrier& b = barrier_at(address, where);
  Warp& warp = warps_[thread / 32];
  for (;;) {
    deliver_boxes(address);
    if ((b.phase & 1) != parity) break;
    if (++waits_in_vain_ > kPatience) fail("waits for a phase that never ends", where);
    // Its other lanes come to their turns, and this warp goes last.
    warp.next_lane = lane_after(warp, thread % 32);
    const auto me = std::find(warp_order_.begin(), warp_order_.end(), thread / 32);
    std::rotate(me, me + 1, warp_order_.end());
    switch_warp();
  }
  ++epoch_;
}

void BlockMachine::bar_sync(int number, int threads, Where where) {
  Request request{.call = Call::bar_sync, .where = where, .from = number, .threads = threads};
  arrive(request);
}

void BlockMachine::bar_arrive(int number, int threads, Where where) {
  Request request{.call = Call::bar_arrive, .where = where, .from = number, .threads = threads};
  arrive(request);
}

// Whether the warp is the last, so that all go on.
bool BlockMachine::bar_arrive(Warp& warp) {
  const Request& request = *warp.request[thread % 32];
  if (request.from < 1 || request.from > 15 || request.threads % 32 != 0) {
    fail("no such barrier", request.where);
  }
  warp.barrier = rank() * 16 + request.from;
  int& arrived = at_threads_[warp.barrier];
  arrived += 32;
  if (arrived < request.threads) return false;
  arrived = 0;
  ++epoch_;
  for (Warp& other : warps_) {
    if (other.state == Warp::State::at_threads && other.barrier == warp.barrier) {
      other.state = Warp::State::runnable;
    }
  }
  return true;
}

void BlockMachine::enter_threads(Warp& warp) {
  if (bar_arrive(warp)) return;
  warp.state = Warp::State::at_threads;
  switch_warp();
}

// ----------------------------------------------------------------------------------------- boxes

void BlockMachine::tma_load(uint32 to, const BoxMap& map, const int (&at)[4], uint32 barrier,
                            Where where) {
  barrier_at(barrier, where);
  BoxOnItsWay box{.to = to, .barrier = barrier, .data = {}};
  const int bytes = map.box_rows * kRowBytes;
  if (map.box_columns != kPanelColumns || to % kGroupBytes != 0) {
    fail("a box that is no panel at a multiple of 1024 bytes", where);
  }
  if (!is_shared(to, bytes)) fail("a box beyond shared memory", where);
  box.data.resize(bytes);
  for (int row = 0; row < map.box_rows; ++row) {
    for (int column = 0; column < kPanelColumns; ++column) {
      const int64 place[4] = {at[0] + column, at[1] + row, at[2], at[3]};
      int64 offset = 0;
      bool exists = true;
      for (int i = 0; i < 4; ++i) {
        exists &= place[i] >= 0 && place[i] < map.sizes[i];
        offset += place[i] * map.strides[i];
      }
      if (!exists) continue;
      std::memcpy(&box.data[swizzled(row * kRowBytes + column * 2)],
                  static_cast<const unsigned char*>(map.data) + offset, 2);
    }
  }
  send(std::move(box), where);
}

void BlockMachine::bulk_load(uint32 to, const void* from, int bytes, uint32 barrier, Where where) {
  barrier_at(barrier, where);
  check_aligned(from, 16, where);
  if (to % 16 != 0 || bytes % 16 != 0) fail("bytes that are no multiple of 16", where);
  if (!is_shared(to, bytes)) fail("bytes beyond shared memory", where);
  const auto* const begin = static_cast<const unsigned char*>(from);
  send({.to = to, .barrier = barrier, .data = {begin, begin + bytes}}, where);
}

void BlockMachine::send_bytes(uint32 to, uint32 from, int bytes, uint32 barrier, Where where) {
  barrier_at(barrier, where);
  if ((to | from | uint32(bytes)) % 16 != 0) fail("bytes that are no multiple of 16", where);
  for (int i = 0; i < bytes; i += 4) {
    note_read(words_[(from + i) / 4], from + i, -1, thread / 32, where);
  }
  const unsigned char* const begin = shared_.get() + from;
  send({.to = to, .barrier = barrier, .data = {begin, begin + bytes}}, where);
}

void BlockMachine::send(BoxOnItsWay box, Where where) {
  for (std::size_t i = 0; i < box.data.size(); i += 4) {
    SharedWord& word = words_[(box.to + i) / 4];
    if (word.copying >= 0) fail("a box on its way to where another one goes", where);
    word.copying = std::int16_t(thread);
  }
  std::memset(shared_.get() + box.to, 0xff, box.data.size());
  boxes_.push_back(std::move(box));
}

void BlockMachine::tma_store(const BoxMap& map, const int (&at)[4], uint32 from, Where where) {
  if (map.box_columns != kPanelColumns || from % kGroupBytes != 0) {
    fail("a box that is no panel at a multiple of 1024 bytes", where);
  }
  threads_[thread]->stores.push_back(
      {.map = map, .at = {at[0], at[1], at[2], at[3]}, .from = from, .where = where});
}

// Whoever closes groups also waits for all of them.
void BlockMachine::tma_store_commit() {}

// As the hardware: rows are written by pieces of 16 bytes, the last one as a whole.

void BlockMachine::wait_stores(Where) {
  for (const BoxToStore& box : threads_[thread]->stores) {
    const BoxMap& map = box.map;
    for (int row = 0; row < map.box_rows; ++row) {
      for (int column = 0; column < kPanelColumns; ++column) {
        const int64 place[4] = {box.at[0] + column, box.at[1] + row, box.at[2], box.at[3]};
        int64 offset = 0;
        bool exists = true;
        for (int i = 0; i < 4; ++i) {
          const int64 end = i == 0 ? (map.sizes[0] + 7) / 8 * 8 : map.sizes[i];
          exists &= place[i] >= 0 && place[i] < end;
          offset += place[i] * map.strides[i];
        }
        if (!exists) continue;
        const uint32 from = box.from + swizzled(row * kRowBytes + column * 2);
        note_read(words_[from / 4], from, -1, thread / 32, box.where);
        std::memcpy(static_cast<unsigned char*>(const_cast<void*>(map.data)) + offset,
                    shared_.get() + from, 2);
      }
    }
  }
  threads_[thread]->stores.clear();
}

void BlockMachine::finish_thread(Thread& t) {
  if (!t.stores.empty()) fail("ends while stores read its shared memory", t.stores[0].where);
  if (!t.products.empty()) fail("ends while products are under way", t.products[0].where);
}

void BlockMachine::stmatrix(uint32 row, const uint32 (&m)[4], Where where) {
  Request request{.call = Call::stmatrix, .where = where};
  request.row = row;
  request.a = &m;
  arrive(request);
}

// PTX ISA, stmatrix: as ldmatrix, the other way.
void BlockMachine::perform_store(Warp& warp) {
  uint16 matrix[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      const uint32 word = (*warp.request[lane]->a)[m];
      matrix[m][lane / 4][lane % 4 * 2] = uint16(word);
      matrix[m][lane / 4][lane % 4 * 2 + 1] = uint16(word >> 16);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Request& r = *warp.request[lane];
    check_range(r.row, 16, "stmatrix writes", r.where);
    note(r.row, 16, Access::write, thread / 32 * 32 + lane, r.where);
    std::memcpy(shared_.get() + r.row, matrix[lane / 8][lane % 8], 16);
  }
}

// -------------------------------------------------------------------------------------- products

void BlockMachine::multiply(const WarpgroupProduct& product, Where where) {
  Thread& t = *threads_[thread];
  ProductOnItsWay on_its_way{
      .product = product, .registers = {}, .group = t.product_groups, .where = where};
  if (product.a) std::copy_n(product.a, 4, on_its_way.registers);
  std::vector<float>& before = t.accumulators[product.d];
  if (before.empty()) before.assign(product.d, product.d + product.blocks * 4);
  std::fill_n(product.d, product.blocks * 4, std::numeric_limits<float>::quiet_NaN());
  t.products.push_back(on_its_way);
}

void BlockMachine::wgmma_commit() { ++threads_[thread]->product_groups; }

void BlockMachine::wgmma_wait(int pending, Where where) {
  Request request{.call = Call::wgmma_wait, .where = where, .from = pending};
  arrive(request);
}

void BlockMachine::perform_products(Warp& warp) {
  const int first = thread / 32 * 32, me = thread;
  std::vector<ProductOnItsWay>& products = threads_[first]->products;
  const int over = threads_[first]->product_groups - warp.request[0]->from;
  for (int lane = 1; lane < 32; ++lane) {
    if (threads_[first + lane]->products.size() != products.size()) {
      fail("lanes of a warp have begun different products", warp.request[0]->where);
    }
  }
  std::size_t count = 0;
  for (; count < products.size() && products[count].group < over; ++count) {
    perform_product(first, count);
  }
  for (int lane = 0; lane < 32; ++lane) {
    Thread& t = *threads_[first + lane];
    t.products.erase(t.products.begin(), t.products.begin() + count);
    for (auto it = t.accumulators.begin(); it != t.accumulators.end();) {
      const bool busy = std::any_of(t.products.begin(), t.products.end(),
                                    [&](const auto& p) { return p.product.d == it->first; });
      if (!busy) std::copy(it->second.begin(), it->second.end(), it->first);
      it = busy ? std::next(it) : t.accumulators.erase(it);
    }
  }
  thread = me;
}

// PTX ISA, wgmma: warp w of four has rows 16 w to 16 w + 15 of a and d; accumulators and a's
// registers as those of m16n8k16. a's tile has rows of d, b's tile columns of d (with a in shared
// memory) or rows of the sum.
void BlockMachine::perform_product(int first_lane, std::size_t index) {
  const ProductOnItsWay& first = threads_[first_lane]->products[index];
  const WarpgroupProduct& p = first.product;
  const int columns = p.blocks * 8, warp_row = first_lane / 32 % 4 * 16;
  const uint32 begin_of_block = block_of(first_lane) * stride_;
  const auto tile = [&](uint32 word) { return begin_of_block + ((word & 0x3fff) << 4); };
  const auto at = [&](uint32 linear) {
    const uint32 address = p.strip ? linear : swizzled(linear);
    if (!is_shared(address, 2)) fail("a product beyond memory", first.where);
    note_read(words_[address / 4], address, -1, first_lane / 32, first.where);
    uint16 bits;
    std::memcpy(&bits, shared_.get() + address, 2);
    return of_16_bits(p.format, bits);
  };
  // Element x of row `row` of a tile, in the panel of its first columns.
  const auto offset = [](int row, int x) { return uint32(row * kRowBytes + x * 2); };
  thread = first_lane;
  float a[16][16];
  std::vector<float> b(16 * columns);
  const bool b_by_rows = p.a ? p.by_rows : !p.transposed;
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < columns; ++n) {
      const uint32 begin = tile(p.b_tile), panel = p.b_tile >> 16 << 4;
      b[k * columns + n] =
          at(begin + (p.strip     ? uint32(n * 16 + k % 8 * 2)
                      : b_by_rows ? offset(n, k)
                                  : n / kPanelColumns * panel + offset(k, n % kPanelColumns)));
    }
    for (int row = 0; row < 16; ++row) {
      const int r = warp_row + row;
      if (!p.a) a[row][k] = at(tile(p.a_tile) + (p.transposed ? offset(k, r) : offset(r, k)));
    }
  }
  for (int lane = 0; lane < 32 && p.a; ++lane) {
    const ProductOnItsWay& own = threads_[first_lane + lane]->products[index];
    if (std::memcmp(own.product.a, own.registers, sizeof own.registers) != 0) {
      fail("registers of a product were written while it was under way", first.where);
    }
    for (int w = 0; w < 4; ++w) {
      for (int half = 0; half < 2; ++half) {
        a[lane / 4 + w % 2 * 8][lane % 4 * 2 + w / 2 * 8 + half] =
            of_16_bits(p.format, uint16(own.registers[w] >> (half * 16)));
      }
    }
  }
  std::vector<double> d(16 * columns);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < columns; ++n) {
        d[row * columns + n] += double(a[row][k]) * double(b[k * columns + n]);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    Thread& t = *threads_[first_lane + lane];
    const WarpgroupProduct& own = t.products[index].product;
    std::vector<float>& x = t.accumulators[own.d];
    for (int i = 0; i < own.blocks * 4; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      x[i] = float((own.adds ? double(x[i]) : 0) + d[row * columns + column]);
    }
  }
}

}  // namespace regard::emulated
