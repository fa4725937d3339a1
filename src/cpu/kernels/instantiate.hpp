// Makes the kernels of one Lanes: what every isa_*.cpp does.
#pragma once

#include "cpu/kernels/backward.hpp"
#include "cpu/kernels/forward.hpp"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/math.hpp"
#include "cpu/kernels/processor.h"

namespace regard {
namespace {

// Four tile products a round, each with its operands in registers.
template <class L>
double spin_tiles(int64 rounds) {
  const TileSession<L> session;
  typename L::Tiles tiles;
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  tiles.template zero<4>();
  tiles.template zero<5>();
  for (int64 round = 0; round < rounds; ++round) {
    tiles.template multiply_add<0, 4, 5>();
    tiles.template multiply_add<1, 4, 5>();
    tiles.template multiply_add<2, 4, 5>();
    tiles.template multiply_add<3, 4, 5>();
  }
  return 2.0 * L::kLanes * L::kLanes * kTileElements<L> * 4 * double(rounds);
}

template <class L>
double spin(int64 rounds) {
  constexpr int kSums = 10;
  typename L::Unit one[L::kLanes * L::kPack] = {};
  asm volatile("" : : "r"(one) : "memory");
  const auto a = L::load_units(one);
  typename L::Vec sum[kSums];
#pragma GCC unroll 16
  for (auto& x : sum) x = L::set(0);
  for (int64 round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (auto& x : sum) x = L::multiply_add(x, a, a);
#pragma GCC unroll 16
    for (auto& x : sum) keep_in_register(x);
  }
  return 2.0 * L::kLanes * L::kPack * kSums * double(rounds);
}

template <class L>
constexpr auto spin_of() {
  if constexpr (kHasTiles<L>) {
    return spin_tiles<L>;
  } else {
    return spin<L>;
  }
}

template <class L>
constexpr CpuShape shape_of_lanes() {
  return {.lanes = L::kLanes,
          .vectors = L::kVectors,
          .pack = L::kPack,
          .real_size = sizeof(typename L::Real),
          .unit_size = sizeof(typename L::Unit),
          .tiles = kHasTiles<L>,
          .terms = kTerms<L>};
}

// Lanes whose panels are one vector, with as many sums in registers.
template <class Base>
struct OneVector : Base {
  static constexpr int kVectors = 1;
  static constexpr int kRows = Base::kRows * Base::kVectors;
};

template <class Base>
constexpr auto backward_of_one_vector() -> decltype(CpuKernels::backward) {
  if constexpr (most_rows_of_one_vector(shape_of_lanes<Base>()) > 0) {
    return run_backward<WithMath<OneVector<Base>>>;
  } else {
    return nullptr;
  }
}

template <class Base, Isa isa, Type type>
constexpr CpuKernels kernels_of() {
  using L = WithMath<Base>;
  static_assert(L::kLanes * L::kVectors <= kMaxPanel);
  static_assert(shape_of(isa, type) == shape_of_lanes<L>());
  return {.forward = run_forward<L>,
          .combine = run_combine<L>,
          .backward = run_backward<L>,
          .backward_of_one_vector = backward_of_one_vector<Base>(),
          .spin = spin_of<L>()};
}

}  // namespace
}  // namespace regard
