// What programs that were compiled against an older regard.h rely on: numbers and layouts.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "regard/regard.h"
#include "regard/regard.hpp"

namespace regard::c_layout {

// A program compiled against an older header relies on each of these numbers. Add fields at
// the end of a struct only; then its sizeof grows and the rest of this list stays.

static_assert(REGARD_OK == 0);
static_assert(REGARD_INVALID_ARGUMENT == 1 + int(regard::Code::invalid_argument));
static_assert(REGARD_UNSUPPORTED == 1 + int(regard::Code::unsupported));
static_assert(REGARD_UNAVAILABLE == 1 + int(regard::Code::unavailable));
static_assert(REGARD_OUT_OF_MEMORY == 1 + int(regard::Code::out_of_memory));
static_assert(REGARD_INTERNAL == 1 + int(regard::Code::internal));
static_assert(REGARD_DEVICE_FAILURE == 1 + int(regard::Code::device_failure));

static_assert(regard::kTypeCount == 7, "a type was added: its value in regard.h");
static_assert(REGARD_NONE == int(regard::Type::none));
static_assert(REGARD_F64 == int(regard::Type::f64));
static_assert(REGARD_F32 == int(regard::Type::f32));
static_assert(REGARD_F16 == int(regard::Type::f16));
static_assert(REGARD_BF16 == int(regard::Type::bf16));
static_assert(REGARD_BOOL == int(regard::Type::boolean));
static_assert(REGARD_I32 == int(regard::Type::i32));

static_assert(REGARD_CAUSAL_NONE == int(regard::Causal::none));
static_assert(REGARD_CAUSAL_TOP_LEFT == int(regard::Causal::top_left));
static_assert(REGARD_CAUSAL_BOTTOM_RIGHT == int(regard::Causal::bottom_right));
static_assert(REGARD_PRECISION_FULL == int(regard::Precision::full));
static_assert(REGARD_PRECISION_TF32 == int(regard::Precision::tf32));
static_assert(REGARD_PRECISION_BF16 == int(regard::Precision::bf16));
static_assert(REGARD_PASS_FORWARD == int(regard::Pass::forward));
static_assert(REGARD_PASS_BACKWARD == int(regard::Pass::backward));
static_assert(REGARD_DEVICE_CPU == int(regard::Device::Kind::cpu));
static_assert(REGARD_DEVICE_CUDA == int(regard::Device::Kind::cuda));
static_assert(REGARD_DEVICE_CHIP == int(regard::Device::Kind::chip));

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "the layouts below are those of LP64");

#define REGARD_PIN(type, field, offset) \
  static_assert(offsetof(type, field) == offset, #type "::" #field " moved")

REGARD_PIN(regard_tensor, data, 0);
REGARD_PIN(regard_tensor, type, 8);
REGARD_PIN(regard_tensor, rank, 12);
REGARD_PIN(regard_tensor, sizes, 16);
REGARD_PIN(regard_tensor, strides, 48);
static_assert(sizeof(regard_tensor) == 80);

REGARD_PIN(regard_attention, size, 0);
REGARD_PIN(regard_attention, q, 8);
REGARD_PIN(regard_attention, k, 88);
REGARD_PIN(regard_attention, v, 168);
REGARD_PIN(regard_attention, bias, 248);
REGARD_PIN(regard_attention, mask, 328);
REGARD_PIN(regard_attention, alibi_slopes, 408);
REGARD_PIN(regard_attention, sink, 488);
REGARD_PIN(regard_attention, cu_seqlens_q, 568);
REGARD_PIN(regard_attention, cu_seqlens_k, 648);
REGARD_PIN(regard_attention, seqused_q, 728);
REGARD_PIN(regard_attention, seqused_k, 808);
REGARD_PIN(regard_attention, max_seqlen_q, 888);
REGARD_PIN(regard_attention, max_seqlen_k, 896);
REGARD_PIN(regard_attention, scale, 904);
REGARD_PIN(regard_attention, softcap, 912);
REGARD_PIN(regard_attention, dropout_p, 920);
REGARD_PIN(regard_attention, dropout_seed, 928);
REGARD_PIN(regard_attention, dropout_offset, 936);
REGARD_PIN(regard_attention, window_left, 944);
REGARD_PIN(regard_attention, window_right, 952);
REGARD_PIN(regard_attention, has_scale, 960);
REGARD_PIN(regard_attention, causal, 964);
REGARD_PIN(regard_attention, precision, 968);
REGARD_PIN(regard_attention, deterministic, 972);
REGARD_PIN(regard_attention, dropout_seed_words, 976);
REGARD_PIN(regard_attention, row_spans, 984);
REGARD_PIN(regard_attention, key_spans, 1064);
REGARD_PIN(regard_attention, q_positions, 1144);
REGARD_PIN(regard_attention, k_position, 1224);
REGARD_PIN(regard_attention, batch_begin, 1232);
REGARD_PIN(regard_attention, head_begin, 1240);
REGARD_PIN(regard_attention, visible, 1248);
REGARD_PIN(regard_attention, continue_from, 1256);
REGARD_PIN(regard_attention, reserved, 1260);
static_assert(sizeof(regard_attention) == 1264);

REGARD_PIN(regard_forward_tensors, size, 0);
REGARD_PIN(regard_forward_tensors, out, 8);
REGARD_PIN(regard_forward_tensors, lse, 88);
static_assert(sizeof(regard_forward_tensors) == 168);

REGARD_PIN(regard_backward_tensors, size, 0);
REGARD_PIN(regard_backward_tensors, out, 8);
REGARD_PIN(regard_backward_tensors, lse, 88);
REGARD_PIN(regard_backward_tensors, dout, 168);
REGARD_PIN(regard_backward_tensors, dlse, 248);
REGARD_PIN(regard_backward_tensors, dq, 328);
REGARD_PIN(regard_backward_tensors, dk, 408);
REGARD_PIN(regard_backward_tensors, dv, 488);
REGARD_PIN(regard_backward_tensors, dbias, 568);
REGARD_PIN(regard_backward_tensors, dsink, 648);
REGARD_PIN(regard_backward_tensors, accumulate, 728);
REGARD_PIN(regard_backward_tensors, reserved, 732);
REGARD_PIN(regard_backward_tensors, delta, 736);
static_assert(sizeof(regard_backward_tensors) == 816);

REGARD_PIN(regard_run, size, 0);
REGARD_PIN(regard_run, device, 8);
REGARD_PIN(regard_run, device_index, 12);
REGARD_PIN(regard_run, device_name, 16);
REGARD_PIN(regard_run, stream, 24);
REGARD_PIN(regard_run, workspace, 32);
REGARD_PIN(regard_run, workspace_size, 40);
REGARD_PIN(regard_run, executor, 48);
REGARD_PIN(regard_run, executor_self, 56);
REGARD_PIN(regard_run, backend, 64);
REGARD_PIN(regard_run, threads, 72);
REGARD_PIN(regard_run, gradients_follow, 76);
REGARD_PIN(regard_run, allocator, 80);
REGARD_PIN(regard_run, allocator_self, 88);
REGARD_PIN(regard_run, multiprocessors, 96);
REGARD_PIN(regard_run, reserved, 100);
static_assert(sizeof(regard_run) == 104);

REGARD_PIN(regard_explanation, size, 0);
REGARD_PIN(regard_explanation, supported, 8);
REGARD_PIN(regard_explanation, reserved, 12);
REGARD_PIN(regard_explanation, workspace, 16);
REGARD_PIN(regard_explanation, pairs, 24);
REGARD_PIN(regard_explanation, flops, 32);
REGARD_PIN(regard_explanation, backend, 40);
REGARD_PIN(regard_explanation, kernel, 104);
static_assert(sizeof(regard_explanation) == 360);

#undef REGARD_PIN

static_assert(std::is_same_v<regard_executor, decltype(regard::Executor::run)>);
static_assert(std::is_same_v<regard_allocator, decltype(regard::Allocator::allocate)>);

// Where tensors follow each other in a struct; its other fields have 4 or 8 bytes.
using Bytes = std::pair<std::size_t, std::size_t>;
template <class T>
constexpr std::array<Bytes, 0> kTensors{};
template <>
constexpr std::array kTensors<regard_attention> = {
    Bytes{offsetof(regard_attention, q), offsetof(regard_attention, max_seqlen_q)},
    Bytes{offsetof(regard_attention, row_spans), offsetof(regard_attention, k_position)}};
template <>
constexpr std::array kTensors<regard_forward_tensors> = {
    Bytes{offsetof(regard_forward_tensors, out), sizeof(regard_forward_tensors)}};
template <>
constexpr std::array kTensors<regard_backward_tensors> = {
    Bytes{offsetof(regard_backward_tensors, out), offsetof(regard_backward_tensors, accumulate)},
    Bytes{offsetof(regard_backward_tensors, delta), sizeof(regard_backward_tensors)}};

// Whether a struct of this size ends between two fields.
template <class T>
bool ends_at_field(std::size_t size) {
  return size % 8 == 0 && std::ranges::none_of(kTensors<T>, [&](const Bytes& bytes) {
           const auto& [begin, end] = bytes;
           return begin < size && size < end && (size - begin) % sizeof(regard_tensor) != 0;
         });
}

}  // namespace regard::c_layout
