// The tile map of a mask, as the emulated GPU makes it: equal to what the dense mask says.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <iterator>
#include <set>
#include <vector>

#include "plan/cuda/kernel/tile_map_layout.h"
#include "tests/cpu/case.hpp"
#include "tests/cuda/emulator.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::emulated;

namespace {

// A problem with one kind of mask, and how many tensors of it heads and batch entries share.
struct MaskCase {
  bool mask = false, row_spans = false, key_spans = false;
  bool packed = false, seqused = false, own_heads = false, own_batch = false;
  int span_count = 1;
  int len_q = 263, len_k = 310;  // of the longest sequence
  std::uint64_t seed = 0;
};

struct Arrays {
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> row_spans, key_spans;
  std::vector<std::int32_t> begins_q{0, 137, 137, 400}, begins_k{0, 200, 290, 520};
  std::vector<std::int32_t> used_q{150, 97, 200}, used_k{300, 260, 170};
};

constexpr int kBatch = 3, kHeads = 2;

// Spans of neighbouring lines are often alike, so that they cover whole tiles.
std::vector<std::int32_t> random_spans(std::uint64_t seed, int lines, int count, int length) {
  std::vector<std::int32_t> spans;
  for (int line = 0; line < lines; ++line) {
    const std::uint64_t stream = seed * 100 + std::uint64_t(line / (line % 300 < 150 ? 90 : 1));
    for (int n = 0; n < count; ++n) {
      const int from = int(tests::uniform(stream, 1, std::uint64_t(n)) * 1.4 * length) - length / 5;
      spans.push_back(from);
      spans.push_back(from + int(tests::uniform(stream, 2, std::uint64_t(n)) * length) - 9);
    }
  }
  return spans;
}

Arrays random_arrays(const MaskCase& c) {
  Arrays x;
  const int entries = (c.own_batch ? kBatch : 1) * (c.own_heads ? kHeads : 1);
  const int rows = c.packed ? 400 : c.len_q, keys = c.packed ? 520 : c.len_k;
  x.row_spans = random_spans(c.seed, entries * rows, c.span_count, c.len_k);
  x.key_spans = random_spans(c.seed + 50, entries * keys, c.span_count, c.len_q);
  for (int n = 0; n < entries * c.len_q * c.len_k; ++n) {  // any byte but 0 shows its pair
    const int i = n / c.len_k % c.len_q, j = n % c.len_k;
    const std::uint64_t block = std::uint64_t(i / 128 * 8 + j / 128);
    const double share = tests::uniform(c.seed + 7, 3, block);  // of the block's visible pairs
    const bool random = tests::uniform(c.seed + 8, 4, std::uint64_t(n)) < 0.001;
    const bool shown = share < 0.3 ? random && share > 0.15 : share > 0.6 || !random;
    x.mask.push_back(shown ? std::uint8_t(1 + n % 255) : std::uint8_t(0));
  }
  return x;
}

Attention attention(const MaskCase& c, const Arrays& x) {
  const std::int64_t b = c.own_batch ? kBatch : 1, h = c.own_heads ? kHeads : 1;
  const int rows = c.packed ? 400 : c.len_q, keys = c.packed ? 520 : c.len_k;
  const auto tensor = [&](int length) {
    return c.packed ? Tensor(nullptr, bf16, {length, kHeads, 64})
                    : Tensor(nullptr, bf16, {kBatch, kHeads, length, 64});
  };
  const auto spans = [&](const std::vector<std::int32_t>& all, int length) {
    return c.packed ? Tensor(all.data(), i32, {h, length, 2 * c.span_count})
                    : Tensor(all.data(), i32, {b, h, length, 2 * c.span_count});
  };
  Attention a{.q = tensor(rows), .k = tensor(keys), .v = tensor(keys)};
  if (c.packed) {
    a.cu_seqlens_q = Tensor(x.begins_q.data(), i32, {kBatch + 1});
    a.cu_seqlens_k = Tensor(x.begins_k.data(), i32, {kBatch + 1});
    a.max_seqlen_q = c.len_q;
    a.max_seqlen_k = c.len_k;
  }
  if (c.seqused) {
    a.seqused_q = Tensor(x.used_q.data(), i32, {kBatch});
    a.seqused_k = Tensor(x.used_k.data(), i32, {kBatch});
  }
  if (c.mask) a.mask = Tensor(x.mask.data(), boolean, {b, h, c.len_q, c.len_k});
  if (c.row_spans) a.row_spans = spans(x.row_spans, rows);
  if (c.key_spans) a.key_spans = spans(x.key_spans, keys);
  return a;
}

// What a source says of a tile: whether it shows some pair, and every pair.
struct TileFacts {
  bool some = false, all = true;

  void add(bool shown) {
    some = some || shown;
    all = all && shown;
  }
};

bool span_holds(const SpanView& spans, int b, int h, int first, int line, int x) {
  const std::int64_t at = b * spans.view.strides.batch + h * spans.view.strides.head +
                          (first + line) * spans.view.strides.row;
  const auto* const ends = static_cast<const std::int32_t*>(spans.view.data) + at;
  for (int n = 0; n < spans.count; ++n) {
    if (ends[2 * n] <= x && x < ends[2 * n + 1]) return true;
  }
  return false;
}

struct Tile {
  int b, h, first_row, end_row, first_key, end_key;
};

// The bits that a map must have, and those that it may have: it looks at each source by itself.
struct Wanted {
  bool visible_must = false, visible_may = true, full_may = true;
};
Wanted wanted(const Problem& p, const Sequence& seq, const Tile& t) {
  TileFacts mask, rows, keys, both;
  for (int i = t.first_row; i < t.end_row; ++i) {
    for (int j = t.first_key; j < t.end_key; ++j) {
      bool shown = true;
      if (p.features.mask) {
        const Strides& s = p.mask.strides;
        const bool x = static_cast<const std::uint8_t*>(
            p.mask.data)[t.b * s.batch + t.h * s.head + i * s.row + j * s.column];
        mask.add(x);
        shown = shown && x;
      }
      if (p.features.row_spans) {
        const bool x = span_holds(p.row_spans, t.b, t.h, int(seq.first_q), i, j);
        rows.add(x);
        shown = shown && x;
      }
      if (p.features.key_spans) {
        const bool x = span_holds(p.key_spans, t.b, t.h, int(seq.first_k), j, i);
        keys.add(x);
        shown = shown && x;
      }
      both.add(shown);
    }
  }
  const auto may = [](bool on, const TileFacts& source) { return !on || source.some; };
  return {.visible_must = both.some,
          .visible_may = may(p.features.mask, mask) && may(p.features.row_spans, rows) &&
                         may(p.features.key_spans, keys),
          .full_may = both.all};
}

// Own tiles begin in the order of their visible tiles; each rank has one of them.
void check_order(const Problem& p, const KernelConfig& config,
                 const std::vector<std::uint64_t>& map) {
  const int64 words = map_words(p, config);
  const auto* const order =
      reinterpret_cast<const std::int32_t*>(map.data() + map_counts_at(p, config)) +
      map_rows(p, config);
  for (int b = 0; b < kBatch; ++b) {
    const Sequence seq = sequence(p.sequences, b);
    const int64 length = maps_keys(config) ? seq.len_k : seq.len_q;
    const int64 first = maps_keys(config) ? seq.first_k : seq.first_q;
    for (int h = 0; h < kHeads; ++h) {
      const int64 row = map_row(p, config, b, h, first, 0);
      int before = INT_MAX;
      std::set<int> tiles;
      for (int64 rank = 0; rank * own_tile(config) < length; ++rank) {
        const int tile = order[row + rank];
        CHECK(tile >= 0);
        REQUIRE(tile * own_tile(config) < length);
        tiles.insert(tile);
        int count = 0;
        for (int64 word = 0; word < words; ++word) {
          count += std::popcount(std::uint32_t(map[std::size_t((row + tile) * words + word)]));
        }
        CHECK(count <= before);
        before = count;
      }
      CHECK(int64(tiles.size()) == divide_up(length, own_tile(config)));
    }
  }
}

// The bit of a pair of a tile. `row`: of the map.
bool bit_of_pair(const Problem& p, const KernelConfig& config,
                 const std::vector<std::uint64_t>& map, int64 row, int other, int line,
                 int column) {
  const auto* const bits =
      reinterpret_cast<const std::uint8_t*>(map.data() + mask_bits_at(p, config));
  const int64 tile = row * other_tiles(p, config) + other;
  const int64 word = tile * mask_tile_bytes(config) + line * mask_line_bytes(config) +
                     column % 8 / 2 * mask_lane_bytes(config);
  const int bit = column / 8 * 2 + column % 2;
  return bits[word + bit / 8] >> bit % 8 & 1;
}

void check_bits(const Problem& p, const KernelConfig& config, const std::vector<std::uint64_t>& map,
                const Tile& t, int64 row, int other) {
  const Strides& s = p.mask.strides;
  const auto* const mask =
      static_cast<const std::uint8_t*>(p.mask.data) + t.b * s.batch + t.h * s.head;
  const bool of_keys = maps_keys(config);
  int wrong = 0;
  for (int i = t.first_row; i < t.end_row; ++i) {
    for (int j = t.first_key; j < t.end_key; ++j) {
      const int x = i - t.first_row, y = j - t.first_key;
      const bool bit = bit_of_pair(p, config, map, row, other, of_keys ? y : x, of_keys ? x : y);
      wrong += bit != (mask[i * s.row + j * s.column] != 0);
    }
  }
  CHECK(wrong == 0);
}

// How many tiles of each kind there were, and ordered maps, so that a test cannot pass on one kind
// alone.
struct Counts {
  int hidden = 0, partial = 0, full = 0, ordered = 0;
};

void check_map(const MaskCase& c, Pass pass, const char* backend, Counts& counts) {
  const Arrays arrays = random_arrays(c);
  Problem p = describe(attention(c, arrays), pass, NullData::allowed);
  // Without tensors' data, describe() leaves out the tables.
  if (c.packed) {
    p.sequences.begins_q = arrays.begins_q.data();
    p.sequences.begins_k = arrays.begins_k.data();
  }
  if (c.seqused) {
    p.sequences.used_q = arrays.used_q.data();
    p.sequences.used_k = arrays.used_k.data();
  }
  const CudaPlan plan = cuda_case::planned(p, "sm_90", backend);
  const CudaLaunch* const launch =
      cuda_case::launch_of(plan, pass == Pass::forward ? Kernel::row_map : Kernel::key_map);
  REQUIRE(launch);
  const KernelConfig& config = launch->config;
  // Bits that entries have for themselves may take more than a mask that they share.
  REQUIRE((config.mask.as_bits || !c.mask || (c.seqused && !c.own_batch)));
  const int64 bytes = plan.workspace.bytes(WorkspacePart::tile_map);
  std::vector<std::uint64_t> map(std::size_t(bytes / kMapWordBytes), ~std::uint64_t(0) / 3);
  KernelParams params;
  params.problem = p;
  params.grid = launch->grid;
  params.by = launch->by;
  params.buffers.tile_map = map.data();
  run_launch(*launch, params, {.order = Order::forward, .seed = c.seed});
  if (config.tile_order) {
    check_order(p, config, map);
    ++counts.ordered;
  }
  const int rows = config.tiling.rows, keys = config.tiling.keys;
  for (int b = 0; b < kBatch; ++b) {
    const Sequence seq = sequence(p.sequences, b);
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < seq.len_q; i += rows) {
        for (int j = 0; j < seq.len_k; j += keys) {
          const bool of_keys = maps_keys(config);
          const int own = of_keys ? j / keys : i / rows, other = of_keys ? i / rows : j / keys;
          const int64 row = map_row(p, config, b, h, of_keys ? seq.first_k : seq.first_q, own);
          const std::uint64_t word =
              map[std::size_t(row * map_words(p, config) + other / kTilesOfMapWord)];
          const bool visible = word >> other % 32 & 1, full = word >> (32 + other % 32) & 1;
          const Tile tile{
              b, h, i, std::min(i + rows, int(seq.len_q)), j, std::min(j + keys, int(seq.len_k))};
          const Wanted want = wanted(p, seq, tile);
          if (config.mask.as_bits) check_bits(p, config, map, tile, row, other);
          CAPTURE(b);
          CAPTURE(h);
          CAPTURE(i);
          CAPTURE(j);
          CHECK((visible || !want.visible_must));
          CHECK((!visible || want.visible_may));
          CHECK((!full || (visible && want.full_may)));
          // Of one source alone, and of one span, the map knows all.
          const int sources = c.mask + c.row_spans + c.key_spans;
          if (sources == 1) CHECK(visible == want.visible_must);
          if (sources == 1 && (c.mask || c.span_count == 1)) CHECK(full == want.full_may);
          ++(full ? counts.full : visible ? counts.partial : counts.hidden);
        }
      }
    }
  }
}

}  // namespace

TEST_SUITE_BEGIN("emulator");

TEST_CASE("a tile map equals the dense mask's") {
  const MaskCase cases[] = {
      {.mask = true},
      {.mask = true, .seqused = true, .own_heads = true, .own_batch = true},
      // Rows of the mask begin at multiples of 16 bytes, and of 4.
      {.mask = true, .len_q = 200, .len_k = 320},
      {.mask = true, .len_q = 200, .len_k = 308},
      {.row_spans = true},
      {.row_spans = true, .packed = true, .own_heads = true, .span_count = 3},
      {.key_spans = true, .own_batch = true},
      {.key_spans = true, .packed = true, .span_count = 2},
      {.mask = true, .row_spans = true, .key_spans = true, .seqused = true, .span_count = 2},
      // Several words in a row of the map, and many rows.
      {.row_spans = true, .own_heads = true, .len_q = 150, .len_k = 9000},
      {.key_spans = true, .own_batch = true, .len_q = 13000, .len_k = 150},
  };
  for (std::size_t n = 0; n < std::size(cases); ++n) {
    MaskCase c = cases[n];
    Counts counts;
    CAPTURE(n);
    for (c.seed = 1; c.seed <= 2; ++c.seed) {
      for (const char* backend : {"cuda:mma", "cuda:wgmma"}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          CAPTURE(backend);
          CAPTURE(int(pass));
          CAPTURE(c.seed);
          check_map(c, pass, backend, counts);
        }
      }
    }
    CHECK((counts.ordered > 0) == (c.len_q + c.len_k > 9000));
    CHECK(counts.hidden > 0);
    CHECK(counts.partial > 0);
    CHECK((counts.full > 0 || c.span_count > 1));  // rows that one span covers
  }
}

TEST_SUITE_END();
