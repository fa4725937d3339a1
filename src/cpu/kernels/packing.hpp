// Rows of tensors as the Units that products multiply: pairs along a row, or across two rows.
#pragma once

#include "cpu/kernels/known_type.hpp"
#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

// Calls pack.operator()<Term>(n) for each term of an element: loads of the lanes `Term` make the
// n-th.
template <class L, class Pack>
REGARD_INLINE void each_term(Pack pack) {
  pack.template operator()<typename TermsOf<L>::template Term<0>>(0);
  if constexpr (kTerms<L> > 1) pack.template operator()<typename TermsOf<L>::template Term<1>>(1);
}

// A vector of Units along a row, zeros after the first `count` elements.
template <class L>
REGARD_INLINE typename L::Vec load_units_of(Type type, const View& view, int64 offset,
                                            int64 count) {
  if constexpr (L::kPack == 1) {
    return L::load_as(type, view.data, offset, count);
  } else {
    return L::load_row_units(type, view.data, offset, count);
  }
}

// Rows of a tensor as Units along the row: vectors of to[row][width], zeros after the row's end.
template <class L>
void pack_rows(typename L::Unit* to, int64 width, const HeadContext& context, const View& view,
               int64 dim, int64 first, int64 rows) {
  with_known(view.type, [&](auto type) {
    for (int64 row = 0; row < rows; ++row) {
      const int64 offset = context.offset_k(view, first + row);
      for (int64 u = 0; u < width; u += L::kLanes) {
        const int64 d = L::kPack * u;
        const auto x = load_units_of<L>(type, view, offset + d, dim - d);
        L::store(reinterpret_cast<typename L::Real*>(to + vector_at<L>(row, u, width)), x);
      }
    }
  });
}

// Rows of Units along the row, from one of them on.
template <class L>
struct RowsOfUnits {
  const typename L::Unit* at = nullptr;
  int64 stride = 0;  // Units
};

// Rows that are close to each other stay in a core's cache as well as packed ones.
inline bool are_near(const View& rows, int64 dim) {
  return rows.strides.row >= 0 && rows.strides.row <= 2 * dim;
}

// A tensor's rows as they lie, from the one at `offset` on, if vectors can multiply them so: those
// of the arithmetic's own type, of whole Units. Otherwise `at` is null. (GCC's own vectors for
// scalar lanes read an element past the last row.)
template <class L>
RowsOfUnits<L> rows_in_place(const View& view, int64 dim, int64 offset) {
  using Unit = typename L::Unit;
  if constexpr (!kHasTiles<L> && L::kLanes > 1) {
    constexpr Type kType = L::kPack == 2 ? Type::bf16 : sizeof(Unit) == 8 ? Type::f64 : Type::f32;
    constexpr int64 kElement = sizeof(Unit) / L::kPack;
    const auto* const row = static_cast<const char*>(view.data) + offset * kElement;
    if (view.type == kType && are_near(view, dim) && dim % L::kPack == 0 &&
        view.strides.row % L::kPack == 0 && reinterpret_cast<uint64>(row) % sizeof(Unit) == 0) {
      return {reinterpret_cast<const Unit*>(row), view.strides.row / L::kPack};
    }
  }
  return {};
}

// Where a row that is not there begins; offsets may be negative.
inline constexpr int64 kNoRow = -int64(~uint64(0) >> 1);

// Units across two rows, from element d on; either may be kNoRow.
template <class L, class SomeType>
REGARD_INLINE typename L::Vec load_pairs(SomeType type, const View& view, int64 dim, int64 d,
                                         int64 even, int64 odd) {
  return L::load_pairs(type, view.data, even == kNoRow ? 0 : even + d, odd == kNoRow ? 0 : odd + d,
                       even == kNoRow ? 0 : dim - d, odd == kNoRow ? 0 : dim - d);
}

// Rows of a tensor as Units across rows: vectors of to[row / pack][width]. The partner of a last
// odd row is zeros. offset(row) is where a row begins, or kNoRow.
template <class L, class OffsetOf>
void pack_pairs(typename L::Unit* to, int64 width, const View& view, int64 dim, int64 rows,
                OffsetOf offset) {
  for (int64 row = 0; row < rows; row += L::kPack) {
    const auto out = [&](int64 d) {
      return reinterpret_cast<typename L::Real*>(to + vector_at<L>(row / L::kPack, d, width));
    };
    const int64 even = offset(row);
    if constexpr (L::kPack == 1) {
      with_known(view.type, [&](auto type) {
        const int64 count = even == kNoRow ? 0 : dim;
        for (int64 d = 0; d < width; d += L::kLanes) {
          L::store(out(d),
                   count > 0 ? L::load_as(type, view.data, even + d, count - d) : L::set(0));
        }
      });
    } else {
      const int64 odd = row + 1 < rows ? offset(row + 1) : kNoRow;
      const bool whole = view.type == Type::bf16 && even != kNoRow && odd != kNoRow;
      const auto* const data = static_cast<const uint16*>(view.data);
      int64 d = 0;
      for (; whole && d + 2 * L::kLanes <= dim; d += 2 * L::kLanes) {
        L::store(out(d), L::half_of_pairs(data + even + d, data + odd + d, false));
        L::store(out(d + L::kLanes), L::half_of_pairs(data + even + d, data + odd + d, true));
      }
      with_known(view.type, [&](auto type) {
        for (; d < width; d += L::kLanes) {
          L::store(out(d), load_pairs<L>(type, view, dim, d, even, odd));
        }
      });
    }
  }
}

// 32 rows of 32 bf16, transposed, into a tile and the one below it, which begins `below` Units on.
template <class L>
void pack_whole_tile(typename L::Unit* to, int64 below, const View& view, int64 d,
                     const int64* begin) {
  const auto* const data = static_cast<const uint16*>(view.data) + d;
#pragma GCC unroll 2
  for (int upper = 0; upper < 2; ++upper) {
    typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      tile[t] = L::interleaved(data + begin[2 * t], data + begin[2 * t + 1], upper);
    }
    L::transpose(tile);
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      const int64 element = t / 4 * 8 + upper * 4 + t % 4;
      auto* const out = to + element / L::kLanes * below + element % L::kLanes * L::kLanes;
      L::store(reinterpret_cast<typename L::Real*>(out), tile[t]);
    }
  }
}

// What pack_pairs makes, transposed, for products that take rows alone: tiles of 16 elements of
// `dim` by 16 Units, dense; row_units of a row of tiles. Zeros after the last row, up to a whole
// tile.
template <class L, class OffsetOf>
void pack_columns(typename L::Unit* to, int64 row_units, const View& view, int64 dim, int64 rows,
                  OffsetOf offset) {
  for (int64 row = 0; row < rows; row += kTileElements<L>) {
    int64 begin[kTileElements<L>];
    for (int64 r = 0; r < kTileElements<L>; ++r)
      begin[r] = row + r < rows ? offset(row + r) : kNoRow;
    const bool whole = view.type == Type::bf16 && row + kTileElements<L> <= rows;
    auto* const tiles = to + row / L::kPack * L::kLanes;
    int64 d = 0;
    for (; whole && d + kTileElements<L> <= dim; d += kTileElements<L>) {
      pack_whole_tile<L>(tiles + d * row_units, L::kLanes * row_units, view, d, begin);
    }
    with_known(view.type, [&](auto type) {
      for (; d < dim; d += L::kLanes) {
        typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) {
          tile[t] = load_pairs<L>(type, view, dim, d, begin[2 * t], begin[2 * t + 1]);
        }
        L::transpose(tile);
        auto* const out = reinterpret_cast<typename L::Real*>(tiles + d * row_units);
#pragma GCC unroll 16
        for (int t = 0; t < L::kLanes; ++t) L::store(out + t * L::kLanes, tile[t]);
      }
    });
  }
}

// Rows packed as A of a product whose k is the rows: Units across rows, which the product walks by
// columns, or which are transposed for tiles.
template <class L>
struct AcrossRows {
  static constexpr Walk kWalk = kHasTiles<L> ? Walk::rows : Walk::columns;
  static constexpr bool kInTiles = kHasTiles<L>;
  const typename L::Unit* units;
  int64 stride;

  AcrossRows(const typename L::Unit* memory, const CpuShape& shape, int64 dim, int64 most_rows)
      : units(memory),
        stride(kHasTiles<L> ? regard::units(shape, most_rows) : padded(shape, dim)) {}
  // Rows of a tensor that are Units as they lie.
  AcrossRows(const typename L::Unit* rows, int64 row_stride) : units(rows), stride(row_stride) {}

  // `to`: the memory that this was made with.
  template <class OffsetOf>
  void pack(typename L::Unit* to, const View& view, int64 dim, int64 rows, OffsetOf offset) const {
    if constexpr (kHasTiles<L>) {
      pack_columns<L>(to, stride, view, dim, rows, offset);
    } else {
      pack_pairs<L>(to, stride, view, dim, rows, offset);
    }
  }
  // Where a row begins; in tiles, the first one of a tile.
  REGARD_INLINE const typename L::Unit* from(int64 row) const {
    return units + row / L::kPack * (kInTiles ? L::kLanes : stride);
  }
};

// Zeros from the pair after `rows` rows to the end of the tile, in one vector of Units across rows.
template <class L>
REGARD_INLINE void clear_last_tile(typename L::Unit* units, int64 width, int64 rows) {
  if constexpr (kHasTiles<L>) {
    for (int64 r = round_up(rows, L::kPack); r < round_up(rows, kTileElements<L>); r += L::kPack) {
      L::store(reinterpret_cast<typename L::Real*>(units + r / L::kPack * width), L::set(0));
    }
  }
}

}  // namespace
}  // namespace regard
