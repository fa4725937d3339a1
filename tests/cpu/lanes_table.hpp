// What one instruction set's lanes do to an array: filled in by a file compiled for it alone.
//
// Nothing of the standard library's may be included here: an inline function of its would leave
// the file as a weak symbol that needs the instruction set.
#pragma once

#include "cpu/kernels/math.hpp"
#include "plan/cpu/kernel/isa.h"

namespace regard::tests {

struct LanesTable {
  // to[i] = the element read as a Real, the last vector a partial one.
  void (*load_f32)(Type, const void* from, float* to, int64 count);
  void (*load_f64)(Type, const void* from, double* to, int64 count);
  void (*store_f32)(Type, void* to, const float* from, int64 count);
  void (*store_f64)(Type, void* to, const double* from, int64 count);
  void (*exp2_f32)(const float* x, float* y, int64 count);
  void (*exp2_f64)(const double* x, double* y, int64 count);
  void (*tanh_f32)(const float* x, float* y, int64 count);
  void (*tanh_f64)(const double* x, double* y, int64 count);
  void (*log2_f32)(const float* x, float* y, int64 count);
  // Of sums of weights that are rounded to bf16; null where none are.
  void (*weight_log2)(const float* x, float* y, int64 count) = nullptr;
  // Transposes [lanes][lanes] in place; returns lanes.
  int (*transpose_f32)(float* tile);
  int (*transpose_f64)(double* tile);
  // to[t] = the sum of row t of [lanes][lanes]. Null for lanes of one.
  void (*sums_f32)(const float* tile, float* to) = nullptr;
  void (*sums_f64)(const double* tile, double* to) = nullptr;
  // Of 2 * lanes bf16: the even ones, then the odd ones. Null for lanes of one.
  void (*even_and_odd)(const void* from, float* to) = nullptr;
  // to[i] = bit i of mask_of(bits), for every lane; returns bits_of of the same mask.
  uint64 (*mask_f32)(uint64 bits, float* to);
};

extern const LanesTable scalar_lanes;
extern const LanesTable neon_lanes;
extern const LanesTable avx2_lanes;
extern const LanesTable avx512_lanes;

namespace {

template <class L>
void load_all(Type type, const void* from, typename L::Real* to, int64 count) {
  for (int64 i = 0; i < count; i += L::kLanes) {
    typename L::Real lanes[L::kLanes];
    L::store(lanes, L::load_as(type, from, i, count - i));
    for (int64 t = 0; t < L::kLanes && i + t < count; ++t) to[i + t] = lanes[t];
  }
}

template <class L>
void store_all(Type type, void* to, const typename L::Real* from, int64 count) {
  for (int64 i = 0; i < count; i += L::kLanes) {
    typename L::Real lanes[L::kLanes] = {};
    for (int64 t = 0; t < L::kLanes && i + t < count; ++t) lanes[t] = from[i + t];
    L::store_as(type, to, i, count - i, L::load(lanes));
  }
}

template <class L, class Function>
void each_vector(const typename L::Real* x, typename L::Real* y, int64 count, Function function) {
  for (int64 i = 0; i < count; i += L::kLanes) {
    typename L::Real lanes[L::kLanes] = {};
    for (int64 t = 0; t < L::kLanes && i + t < count; ++t) lanes[t] = x[i + t];
    L::store(lanes, function(L::load(lanes)));
    for (int64 t = 0; t < L::kLanes && i + t < count; ++t) y[i + t] = lanes[t];
  }
}

template <class L>
void exp2_all(const typename L::Real* x, typename L::Real* y, int64 count) {
  each_vector<L>(x, y, count, [](typename L::Vec v) { return WithMath<L>::exp2(v); });
}
template <class L>
void tanh_all(const typename L::Real* x, typename L::Real* y, int64 count) {
  each_vector<L>(x, y, count, [](typename L::Vec v) { return WithMath<L>::tanh(v); });
}
template <class L>
void log2_all(const typename L::Real* x, typename L::Real* y, int64 count) {
  each_vector<L>(x, y, count, [](typename L::Vec v) { return WithMath<L>::log2(v); });
}

template <class L>
int transpose_tile(typename L::Real* tile) {
  typename L::Vec rows[L::kLanes];
  for (int t = 0; t < L::kLanes; ++t) rows[t] = L::load(tile + t * L::kLanes);
  L::transpose(rows);
  for (int t = 0; t < L::kLanes; ++t) L::store(tile + t * L::kLanes, rows[t]);
  return L::kLanes;
}

template <class L>
void sums_of_rows(const typename L::Real* tile, typename L::Real* to) {
  typename L::Vec rows[L::kLanes];
  for (int t = 0; t < L::kLanes; ++t) rows[t] = L::load(tile + t * L::kLanes);
  L::store(to, L::sums(rows));
}

template <class L>
void split_pairs(const void* from, typename L::Real* to) {
  typename L::Vec even, odd;
  L::load_even_and_odd(from, even, odd);
  L::store(to, even);
  L::store(to + L::kLanes, odd);
}

template <class L>
uint64 mask_bits(uint64 bits, typename L::Real* to) {
  const auto mask = L::mask_of(bits);
  L::store(to, L::select(mask, L::set(1), L::set(0)));
  return L::bits_of(mask);
}

template <class F32, class F64>
constexpr LanesTable table_of() {
  LanesTable table{.load_f32 = load_all<F32>,
                   .load_f64 = load_all<F64>,
                   .store_f32 = store_all<F32>,
                   .store_f64 = store_all<F64>,
                   .exp2_f32 = exp2_all<F32>,
                   .exp2_f64 = exp2_all<F64>,
                   .tanh_f32 = tanh_all<F32>,
                   .tanh_f64 = tanh_all<F64>,
                   .log2_f32 = log2_all<F32>,
                   .transpose_f32 = transpose_tile<F32>,
                   .transpose_f64 = transpose_tile<F64>,
                   .mask_f32 = mask_bits<F32>};
  if constexpr (F32::kLanes > 1) {
    table.sums_f32 = sums_of_rows<F32>;
    table.sums_f64 = sums_of_rows<F64>;
    table.even_and_odd = split_pairs<F32>;
  }
  return table;
}

}  // namespace
}  // namespace regard::tests
