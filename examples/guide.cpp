// The programs of docs/guide-cpp.md: each function is a chapter of it and checks what it computed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <regard/regard.hpp>
#include <string>
#include <thread>
#include <vector>

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

std::vector<float> waves(std::int64_t count, double step) {
  std::vector<float> values(count);
  for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(std::sin(step * i));
  return values;
}

float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

void strides() {
  const std::int64_t B = 2, H = 4, S = 50, D = 16;
  std::vector<float> q = waves(B * S * H * D, 0.1), k = waves(B * S * H * D, 0.3),
                     v = waves(B * S * H * D, 0.7), out(B * S * H * D);
  // [strides]
  // Memory in the order (B, S, H, D): the sizes stay (B, H, S, D), and the strides say the order.
  const auto view = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {B, H, S, D}, {S * H * D, D, H * D, 1}};
  };
  regard::forward({.q = view(q), .k = view(k), .v = view(v)}, {.out = view(out)});
  // [/strides]
  std::vector<float> head(S * D), copy_q(S * D), copy_k(S * D), copy_v(S * D), expected(S * D);
  for (std::int64_t i = 0; i < S; ++i) {
    for (std::int64_t d = 0; d < D; ++d) {  // batch entry 1, head 2
      const std::int64_t from = ((1 * S + i) * H + 2) * D + d;
      copy_q[i * D + d] = q[from], copy_k[i * D + d] = k[from], copy_v[i * D + d] = v[from];
      head[i * D + d] = out[from];
    }
  }
  const auto dense = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {1, 1, S, D}};
  };
  regard::forward({.q = dense(copy_q), .k = dense(copy_k), .v = dense(copy_v)},
                  {.out = dense(expected)});
  require(largest_difference(head, expected) < 1e-6F, "strides");
}

void packed() {
  const std::int64_t H = 4, D = 16;
  // [packed]
  // Three sequences of 5, 0 and 7 rows stand one after the other, without padding.
  std::vector<std::int32_t> begins{0, 5, 5, 12};
  const std::int64_t batch = 3, total = 12, longest = 7;
  std::vector<float> q = waves(total * H * D, 0.1), k = waves(total * H * D, 0.3),
                     v = waves(total * H * D, 0.7), out(total * H * D), lse(H * total);
  const auto rows = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {total, H, D}};
  };
  const regard::Tensor table{begins.data(), regard::i32, {batch + 1}};
  const regard::Attention attention{.q = rows(q),
                                    .k = rows(k),
                                    .v = rows(v),
                                    .cu_seqlens_q = table,
                                    .cu_seqlens_k = table,
                                    .max_seqlen_q = longest,
                                    .max_seqlen_k = longest,
                                    .causal = regard::Causal::bottom_right};
  const regard::Tensor log_sums{lse.data(), regard::f32, {H, total}};
  regard::forward(attention, {.out = rows(out), .lse = log_sums});
  // [/packed]
  // The first row of a causal sequence sees its own key alone, so that its result is that value.
  require(std::abs(out[5 * H * D] - v[5 * H * D]) < 1e-6F, "packed");
}

void workspace() {
  const std::int64_t B = 2, H = 4, S = 300, D = 32;
  std::vector<float> q = waves(B * H * S * D, 0.1), k = q, v = waves(B * H * S * D, 0.7),
                     out(B * H * S * D), again(B * H * S * D);
  const auto tensor = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {B, H, S, D}};
  };
  const regard::Attention attention{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  // [workspace]
  const regard::ForwardOutputs outputs{.out = tensor(out)};
  std::vector<std::byte> memory(regard::workspace(attention, outputs));
  regard::forward(attention, outputs, {.workspace = {memory.data(), memory.size()}});
  // [/workspace]
  regard::forward(attention, {.out = tensor(again)});
  require(out == again, "workspace");
}

void shared_mask() {
  const std::int64_t B = 1, H = 2, S = 300, D = 16;
  std::vector<float> q = waves(B * H * S * D, 0.1), k = waves(B * H * S * D, 0.3),
                     v = waves(B * H * S * D, 0.7), out(B * H * S * D), again(B * H * S * D);
  const auto tensor = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {B, H, S, D}};
  };
  const regard::Run run{};
  // [mask]
  // Each row sees the 100 keys of its document.
  std::vector<std::int32_t> spans;
  for (std::int32_t i = 0; i < S; ++i)
    spans.insert(spans.end(), {i / 100 * 100, i / 100 * 100 + 100});
  regard::Attention layer{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  layer.row_spans = regard::Tensor{spans.data(), regard::i32, {S, 2}};

  // Once: on a GPU, memory is device memory at a multiple of 256 bytes.
  std::vector<std::byte> memory(regard::mask_memory(layer, run));
  const regard::Mask mask = regard::make_mask(layer, {memory.data(), memory.size()}, run);

  // In each layer, forward and backward.
  regard::forward({.q = tensor(q), .k = tensor(k), .v = tensor(v), .visible = mask},
                  {.out = tensor(out)}, run);
  // [/mask]
  regard::forward(layer, {.out = tensor(again)}, run);
  require(out == again, "mask");
}

void part_of_a_sequence() {
  const std::int64_t S = 512, D = 16;
  std::vector<float> q = waves(S * D, 0.1), k = waves(S * D, 0.3), v = waves(S * D, 0.7);
  const auto tensor = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {1, 1, S, D}};
  };
  // [positions]
  // Rows 0 to 127 and 384 to 511 of a sequence of 512, over all of its keys.
  std::vector<float> rows(2 * 128 * D), part(2 * 128 * D);
  std::copy_n(q.begin(), 128 * D, rows.begin());
  std::copy_n(q.begin() + 384 * D, 128 * D, rows.begin() + 128 * D);
  std::vector<std::int32_t> places{0, 384};  // of the first of each 128 rows
  regard::Attention own{
      .q = {rows.data(), regard::f32, {1, 1, 256, D}}, .k = tensor(k), .v = tensor(v)};
  own.q_positions = regard::Tensor{places.data(), regard::i32, {2}};
  own.causal = regard::Causal::top_left;
  regard::forward(own, {.out = {part.data(), regard::f32, {1, 1, 256, D}}});
  // [/positions]
  // [merging]
  // The same over half of the keys at a time; the second call continues the result of the first.
  std::vector<float> merged(part.size()), lse(256);
  const regard::ForwardOutputs both{.out = {merged.data(), regard::f32, {1, 1, 256, D}},
                                    .lse = {lse.data(), regard::f32, {1, 1, 256}}};
  for (const std::int64_t first : {0, 256}) {
    own.k = {k.data() + first * D, regard::f32, {1, 1, 256, D}};
    own.v = {v.data() + first * D, regard::f32, {1, 1, 256, D}};
    own.k_position = first;
    own.continue_from = first > 0;
    regard::forward(own, both);
  }
  // [/merging]
  require(largest_difference(part, merged) < 1e-6F, "merging");
  std::vector<float> whole(S * D);
  regard::Attention all{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  all.causal = regard::Causal::top_left;
  regard::forward(all, {.out = tensor(whole)});
  std::copy_n(whole.begin() + 384 * D, 128 * D, whole.begin() + 128 * D);
  whole.resize(part.size());
  require(largest_difference(part, whole) < 1e-6F, "positions");
}

void executor() {
  const std::int64_t B = 2, H = 4, S = 300, D = 32;
  std::vector<float> q = waves(B * H * S * D, 0.1), k = q, v = waves(B * H * S * D, 0.7),
                     out(B * H * S * D), again(B * H * S * D);
  const auto tensor = [&](std::vector<float>& x) {
    return regard::Tensor{x.data(), regard::f32, {B, H, S, D}};
  };
  const regard::Attention attention{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  // [executor]
  struct Pool {  // stands for the program's own thread pool
    int calls = 0;
    static void run(void* self, int tasks, void (*task)(void*, int), void* context) {
      ++static_cast<Pool*>(self)->calls;
      std::vector<std::thread> threads;
      for (int index = 0; index < tasks; ++index) threads.emplace_back(task, context, index);
      for (std::thread& thread : threads) thread.join();  // all have returned
    }
  };
  Pool pool;
  regard::forward(attention, {.out = tensor(out)},
                  {.threads = 4, .executor = {.run = Pool::run, .self = &pool}});
  // [/executor]
  regard::forward(attention, {.out = tensor(again)});
  require(pool.calls > 0 && out == again, "executor");
}

void errors() {
  std::vector<float> q = waves(2 * 8 * 10 * 64, 0.1), out = q;
  std::string text;
  const regard::Tensor rows{q.data(), regard::f32, {2, 8, 10, 64}};
  const regard::Tensor fewer{q.data(), regard::f32, {2, 3, 10, 64}};
  const regard::Tensor result{out.data(), regard::f32, {2, 8, 10, 64}};
  // [errors]
  try {
    regard::forward({.q = rows, .k = fewer, .v = fewer}, {.out = result});
  } catch (const regard::Error& error) {
    // error.code() is Code::invalid_argument, error.argument() "k", and what() the whole text:
    text = error.what();  // k = f32 [2, 3, 10, 64]: q's heads must be a multiple of k's
  }
  // [/errors]
  require(text == "k = f32 [2, 3, 10, 64]: q's heads must be a multiple of k's", "errors");
}

void explaining() {
  // [explain]
  const regard::Tensor q{nullptr, regard::bf16, {2, 32, 4096, 128}};  // sizes alone
  const regard::Tensor kv{nullptr, regard::bf16, {2, 8, 4096, 128}};
  const regard::Explanation plan =
      regard::explain({.q = q, .k = kv, .v = kv, .causal = regard::Causal::top_left},
                      regard::Pass::backward, {.device = regard::chip("sm_90")});
  std::printf("%s", plan.text.c_str());
  // [/explain]
  require(plan.supported && plan.backend == "cuda:wgmma", "explain");
}

}  // namespace

int main() {
  strides();
  packed();
  workspace();
  shared_mask();
  part_of_a_sequence();
  executor();
  errors();
  explaining();
  std::printf("the guide's programs are right\n");
}
