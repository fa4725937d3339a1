// Ranks on the emulated GPU, over the tests' own NCCL: the library's calls, whose kernels run on
// the CPU, against float64.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/cuda/fake.hpp"
#include "tests/distributed/fake_nccl.hpp"
#include "tests/distributed/rank_case.hpp"
#include "tests/distributed/thread_ranks.hpp"

using namespace regard;
using namespace regard::tests;
using distributed::Overlap;
using distributed::Scheme;

namespace {

Settings settings(Settings s) {
  if (s.type == f32) s.type = f16;
  s.batch = 1;
  s.heads_q = 2;
  s.len_q = s.len_k = 300;
  s.dim = 32;
  s.dim_v = 16;
  return s;
}

// Memory of the host's, as the device's: what the driver of the tests allocates is no other.
void give_to_device(const FakeCuda& fake, const Array& x) {
  if (!x.given() || x.count() == 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(x.tensor().data);
  fake.machine->memory[address] = {.bytes = x.bytes().size(), .device = 0};
}

void take_from_device(const FakeCuda& fake, const Array& x) {
  if (x.given()) fake.machine->memory.erase(reinterpret_cast<std::uintptr_t>(x.tensor().data));
}

std::vector<const Array*> arrays_of(const RankCase& c) {
  return {&c.q,   &c.k,  &c.v,  &c.bias, &c.mask, &c.slopes, &c.sink,  &c.out,
          &c.lse, &c.dq, &c.dk, &c.dv,   &c.dout, &c.dlse,   &c.dbias, &c.dsink};
}

void check_case(const FakeCuda& fake, const WholeCase& problem, int size) {
  Case found(problem.settings);
  const distributed::Plan plan = problem.plan(size);
  Mail mail(size);
  std::vector<RankCase> parts;
  for (int rank = 0; rank < size; ++rank) parts.emplace_back(found, plan, rank);
  for (const RankCase& part : parts) {
    for (const Array* x : arrays_of(part)) give_to_device(fake, *x);
  }
  const auto errors = on_ranks(size, [&](int rank) {
    FakeCommunicator communicator{.ranks = mail.of(rank)};
    const distributed::Collectives ranks = distributed::nccl_collectives(&communicator);
    parts[std::size_t(rank)].forward(plan, ranks, {.device = cuda(0)});
    parts[std::size_t(rank)].backward(plan, ranks, {.device = cuda(0)});
  });
  for (const std::string& error : errors) REQUIRE(error == "");
  CHECK(mail.is_empty());
  for (int rank = 0; rank < size; ++rank) put(found, parts[std::size_t(rank)], plan, rank);
  for (const RankCase& part : parts) {
    for (const Array* x : arrays_of(part)) take_from_device(fake, *x);
  }

  const Case want(problem.settings, Case::Values::exact);
  Array spans;
  const Attention a = problem.attention(want, spans);
  regard::forward(a, want.outputs());
  regard::backward(a, want.inputs(), want.gradients());
  CAPTURE(to_string(problem.settings));
  for (std::size_t n = 0; n < want.results().size(); ++n) {
    if (!want.results()[n]->given()) continue;
    CAPTURE(kResultNames[n]);
    const Array& result = *want.results()[n];
    const double most = tolerance(problem.settings.type);
    const double allowed = result.tensor().type == f32 ? std::max(most, 1e-6) : most;  // dsink
    CHECK(row_error(*found.results()[n], result, 0.1) <= allowed);
  }
}

}  // namespace

TEST_SUITE_BEGIN("emulated_distributed");

TEST_CASE("ranks on a GPU: causal, documents, windows") {
  const FakeCuda fake;
  Settings s = settings({.sink = true, .dlse = true});
  s.causal = Causal::top_left;
  check_case(fake, {.settings = s}, 3);
  check_case(fake, {.settings = s, .scheme = Scheme::ulysses}, 3);
  check_case(fake, {.settings = s, .scheme = Scheme::ring}, 2);
  for (const Scheme scheme : {Scheme::gather, Scheme::ulysses, Scheme::ring}) {
    check_case(fake, {.settings = s, .cu_seqlens = {0, 40, 200, 280}, .scheme = scheme}, 2);
  }
  s.causal = Causal::none;
  s.window = {60, 20};
  check_case(fake, {.settings = s, .scheme = Scheme::halo}, 2);
  check_case(fake, {.settings = s, .scheme = Scheme::ulysses}, 2);
}

TEST_CASE("ranks on a GPU: terms, and gradients that are accumulated") {
  const FakeCuda fake;
  Settings s = settings({.bias = f32,
                         .alibi = true,
                         .sink = true,
                         .dropout = 0.2,
                         .accumulate = true,
                         .gaps = false});
  s.causal = Causal::top_left;
  check_case(fake, {.settings = s}, 2);
  check_case(fake, {.settings = s, .scheme = Scheme::ulysses}, 2);
  check_case(fake, {.settings = s, .scheme = Scheme::ring}, 2);
  s.type = f64;
  s.bias = f64;
  s.window = {90, -1};
  check_case(fake, {.settings = s, .scheme = Scheme::halo}, 2);
  check_case(fake, {.settings = s, .scheme = Scheme::ulysses}, 3);
  check_case(fake, {.settings = s, .scheme = Scheme::ring}, 3);
}

TEST_CASE("ranks on a GPU: some heads while keys of others move") {
  const FakeCuda fake;
  Settings s = settings({.bias = f32, .sink = true, .dropout = 0.2, .accumulate = true});
  s.heads_q = 3;
  s.heads_kv = 3;
  s.causal = Causal::top_left;
  check_case(fake, {.settings = s}, 2);
  CHECK(fake.machine->waits.empty());
  check_case(fake, {.settings = s, .overlap = Overlap::heads}, 2);
  // Of two ranks' calls. Forward: the side stream for own keys, the caller's for the keys of either
  // group; backward: the caller's for the keys of the first group, for all others and for all sums,
  // the side stream for own keys and for the sums of each of three groups. And at each call's end.
  std::map<bool, int> waits;  // whether the caller's stream, which is null, waits
  for (const auto& [first, second] : fake.machine->waits) {
    CHECK((first == nullptr) != (second == nullptr));
    ++waits[second == nullptr];
  }
  CHECK(waits[true] == 2 * (3 + 4));
  CHECK(waits[false] == 2 * (1 + 4));
  s.window = {90, -1};
  check_case(fake, {.settings = s, .scheme = Scheme::halo, .overlap = Overlap::heads}, 2);
}

// Two runs of heads, which share one head of bias and mask.
TEST_CASE("ranks on a GPU: heads that do not divide") {
  const FakeCuda fake;
  Settings s = settings({.bias = f32,
                         .bias_broadcast = {true, true, true, false},
                         .mask = true,
                         .mask_broadcast = {true, true, false, false}});
  s.heads_q = 6;
  s.heads_kv = 3;
  s.wide_results = true;
  check_case(fake, {.settings = s, .scheme = Scheme::ulysses}, 2);
}

// Before anything moves.
TEST_CASE("ranks on a GPU: memory that the device does not reach") {
  const FakeCuda fake;
  const WholeCase problem{.settings = settings({})};
  const Case whole(problem.settings);
  const distributed::Plan plan = problem.plan(2);
  const RankCase part(whole, plan, 0);
  Mail mail(2);
  FakeCommunicator communicator{.ranks = mail.of(0)};
  const distributed::Collectives ranks = distributed::nccl_collectives(&communicator);
  const auto refused = [&](const Run& run) {
    try {
      part.forward(plan, ranks, run);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string("accepted");
  };
  CHECK(refused({.device = cuda(0)}) == "q");
  CHECK(refused({.device = chip("sm_90")}) == "collectives.memory");
  CHECK(refused({}) == "collectives.memory");
  CHECK(mail.is_empty());
  for (const Array* x : arrays_of(part)) give_to_device(fake, *x);
  communicator.fails = true;
  CHECK(refused({.device = cuda(0)}) == "collectives.exchange");
  for (const Array* x : arrays_of(part)) take_from_device(fake, *x);
}

TEST_CASE("sums of rows on a GPU") {
  const FakeCuda fake;
  for (const Type type : {f32, f16, bf16, f64}) {
    for (const std::int64_t size : {128, 200, 37}) {  // whole vectors, a part of a warp, none
      for (const bool gaps : {false, true}) {
        CAPTURE(name_of(type));
        CAPTURE(size);
        CAPTURE(gaps);
        const std::vector<std::int64_t> sizes{2, 3, 9, size};
        const Type wide = type == f64 ? f64 : f32;
        const Array first(wide, sizes, gaps), second(wide, sizes), to(type, sizes, gaps);
        for (std::int64_t n = 0; n < to.count(); ++n) {
          first.set(n, 0.001 * double(n));
          second.set(n, 3.0 - 0.01 * double(n % 100));
        }
        for (const Array* x : {&first, &second, &to}) give_to_device(fake, *x);
        cuda_memory::add_rows(0, first, second, to, nullptr);
        std::int64_t wrong = 0;
        for (std::int64_t n = 0; n < to.count(); ++n) {
          const double sum = rounded(wide, first.get(n) + second.get(n));
          wrong += to.get(n) != rounded(type, sum);
        }
        CHECK(wrong == 0);
        CHECK(to.gaps_intact());
        for (const Array* x : {&first, &second, &to}) take_from_device(fake, *x);
      }
    }
  }
}

TEST_CASE("copies of rows by kernels") {
  const FakeCuda fake;
  const auto byte = [](std::size_t n) { return char(n * 31 % 251); };
  // Parts of every size, rows that follow each other or not; then what vectors do not fit.
  const std::vector<std::array<std::size_t, 4>> copies{
      {512, 3, 512, 512}, {1536, 2, 2048, 1552}, {48, 5, 64, 48}, {1040, 3, 1040, 1056},
      {16, 1, 0, 0},      {7, 3, 8, 9},          {32, 2, 40, 32}, {0, 2, 16, 16}};
  for (const auto& [width, rows, to_pitch, from_pitch] : copies) {
    CAPTURE(width);
    std::vector<char> from(8192), to(8192, '.'), wanted(8192, '.');
    for (std::size_t n = 0; n < from.size(); ++n) from[n] = byte(n);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t n = 0; n < width; ++n) {
        wanted[16 + row * to_pitch + n] = byte(32 + row * from_pitch + n);
      }
    }
    for (const std::vector<char>* x : {&from, &to}) {
      fake.machine->memory[reinterpret_cast<std::uintptr_t>(x->data())] = {.bytes = x->size(),
                                                                           .device = 0};
    }
    const cuda_memory::RowCopy copy{.to = to.data() + 16,
                                    .from = from.data() + 32,
                                    .to_pitch = to_pitch,
                                    .from_pitch = from_pitch,
                                    .width = width,
                                    .rows = rows};
    const std::size_t launches = fake.machine->launches.size();
    cuda_memory::copy_rows_by_kernels(0, &copy, 1, nullptr);
    CHECK(to == wanted);
    const bool fits = width > 0 && width % 16 == 0 && (to_pitch | from_pitch) % 16 == 0;
    CHECK(fake.machine->launches.size() - launches == (fits ? 1 : 0));
    for (const std::vector<char>* x : {&from, &to}) {
      fake.machine->memory.erase(reinterpret_cast<std::uintptr_t>(x->data()));
    }
  }
}

TEST_CASE("sums of rows that are refused") {
  const FakeCuda fake;
  const Array x(f32, {1, 2, 3, 4}), other(f32, {1, 2, 3, 5}), flat(f32, {2, 3, 4}),
      wide(f64, {1, 2, 3, 4}), narrow(f16, {1, 2, 3, 4}), integers(i32, {1, 2, 3, 4});
  const auto argument = [](const Array& first, const Array& second, const Array& to) {
    return error_of([&] { cuda_memory::add_rows(0, first, second, to, nullptr); }).argument();
  };
  CHECK(argument(flat, x, x) == "first");
  CHECK(argument(narrow, x, x) == "first");
  CHECK(argument(x, other, x) == "second");
  CHECK(argument(x, wide, x) == "second");
  CHECK(argument(wide, x, wide) == "second");
  CHECK(argument(x, x, other) == "to");
  CHECK(argument(x, x, integers) == "to");
  CHECK(argument(wide, wide, x) == "to");
  const auto of_sizes = [](std::int64_t batch, std::int64_t heads, void* data) {
    const Tensor made{data, f32, {batch, heads, 1, 4}, {0, 0, 0, 1}};
    return error_of([&] { cuda_memory::add_rows(0, made, made, made, nullptr); }).argument();
  };
  float element = 0;
  CHECK(of_sizes(1, 1, nullptr) == "first");
  CHECK(of_sizes(-1, 1, &element) == "first");
  CHECK(of_sizes(std::int64_t(1) << 33, std::int64_t(1) << 33, &element) == "first");
}

TEST_SUITE_END();
