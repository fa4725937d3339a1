// The emulated machine itself: its matrix instructions against plain products, and that it reports
// what a GPU would pass over in silence.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "rows/element.hpp"
#include "tests/cpu/case.hpp"
#include "tests/cuda/emulator.hpp"

using namespace regard;
using namespace regard::emulated;

namespace {

struct Shape {
  int warps = 1;
  int shared = 4096;
  int blocks = 1;
  int level = 80;  // 90: with Hopper's part of the machine
  int cluster = 1;
  const char* header = "cuda/kernels/element.cuh";
};

// Runs a kernel of these lines; q, k, v and out are its pointers. Returns the fault, or "".
std::string run(const std::string& lines, Shape shape = {}, const void* q = nullptr,
                const void* k = nullptr, void* out = nullptr, Order order = Order::forward) {
  const std::string unit = "#define REGARD_LEVEL " + std::to_string(shape.level) +
                           "\n#define REGARD_CLUSTER " + std::to_string(shape.cluster) +
                           "\n#include \"cuda/kernels/params.h\"\n" +
                           (shape.level >= 90 ? "#include \"cuda/kernels/ptx_hopper.cuh\"\n" : "") +
                           "#include \"" + shape.header + "\"\n" +
                           "using namespace regard;\n"
                           "extern \"C\" void regard_kernel(KernelParams params) {\n" +
                           lines + "}\n";
  struct Bound {
    KernelEntry entry;
    KernelParams params;
  };
  static BlockMachine machine;
  KernelParams params;
  params.problem.q.data = const_cast<void*>(q);
  params.problem.k.data = const_cast<void*>(k);
  params.problem.out.data = out;
  const Bound bound{compiled(unit, machine), params};
  try {
    machine.run({.kernel =
                     [](const void* context) {
                       const Bound& kernel = *static_cast<const Bound*>(context);
                       kernel.entry(kernel.params, {});
                     },
                 .params = &bound,
                 .blocks = shape.blocks,
                 .threads = shape.warps * 32,
                 .shared_bytes = shape.shared,
                 .cluster = bound.entry.cluster,
                 .order = order});
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

void check_fault(const std::string& lines, const std::string& expected, Shape shape = {}) {
  const std::string fault = run(lines, shape);
  CHECK_MESSAGE(fault.find(expected) != std::string::npos,
                "expected \"" << expected << "\", got: " << fault);
}

// Matrices of 16 x 16 (f32: 16 x 8) and 16 x 8 (8 x 8), and their product in `out`, 16 x 8.
constexpr char kLoad[] = R"(
  unsigned char* const shared = &shared_memory<unsigned char>();
  const int lane = lane_index();
  for (int i = lane; i < 32; i += 32) {
    store_shared_128(i * 16, load_global_128((const char*)params.problem.q.data + i * 16));
  }
  if (lane < 16) {
    store_shared_128(512 + lane * 16, load_global_128((const char*)params.problem.k.data + lane * 16));
  }
  sync_warp();
  uint32 a[4], b[4];
  float d[4] = {1, 2, 3, 4};
)";
constexpr char kStore[] = R"(
  float* const out = static_cast<float*>(params.problem.out.data);
  for (int e = 0; e < 4; ++e) out[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = d[e];
)";

void check_product(const std::string& lines, const std::vector<double>& a,
                   const std::vector<double>& b, int depth, const void* stored_a,
                   const void* stored_b, int level = 80) {
  std::vector<float> out(16 * 8);
  REQUIRE(run(kLoad + lines + kStore, {.level = level}, stored_a, stored_b, out.data()) == "");
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = column % 2 + row / 8 * 2 + 1;
      for (int k = 0; k < depth; ++k) sum += a[row * depth + k] * b[k * 8 + column];
      CHECK(out[row * 8 + column] == doctest::Approx(sum).epsilon(1e-6));
    }
  }
}

}  // namespace

TEST_SUITE_BEGIN("emulator");

TEST_CASE("16-bit products, from rows and from transposed columns") {
  for (const Type type : {f16, bf16}) {
    std::vector<std::uint16_t> a(256), b(128);
    std::vector<double> exact_a(256), exact_b(128);
    const View view_a{a.data(), type, {}}, view_b{b.data(), type, {}};
    for (int i = 0; i < 256; ++i) {
      store_element(view_a, i, tests::uniform(1, 2, i) - 0.5);
      exact_a[i] = load_element(view_a, i);
    }
    for (int i = 0; i < 128; ++i) {
      store_element(view_b, i, tests::uniform(1, 3, i) - 0.5);
      exact_b[i] = load_element(view_b, i);
    }
    const std::string product =
        std::string("mma_m16n8k16<") + (type == f16 ? "F16" : "Bf16") + ">(d, a, b[0], b[1]);\n";
    const std::string load_a = "ldmatrix(a, lane % 16 * 32 + lane / 16 * 16);\n";
    // The second half of what is loaded repeats the first.
    check_product(load_a + "ldmatrix_trans(b, 512 + lane % 16 * 16);\n" + product, exact_a, exact_b,
                  16, a.data(), b.data());
    if (type == f16) {
      check_product(load_a + "ldmatrix_trans(b, 512 + lane % 16 * 16);\n" + product, exact_a,
                    exact_b, 16, a.data(), b.data(), 75);
    }
    // b by its columns: 8 rows of 16.
    std::vector<std::uint16_t> columns(128);
    for (int i = 0; i < 128; ++i) columns[i % 8 * 16 + i / 8] = b[i];
    check_product(load_a + "ldmatrix(b, 512 + lane % 8 * 32 + lane / 8 % 2 * 16);\n" + product,
                  exact_a, exact_b, 16, a.data(), columns.data());
  }
}

TEST_CASE("TF32 products leave out the last 13 bits") {
  std::vector<float> a(128), b(64), columns(64);
  std::vector<double> exact_a(128), exact_b(64);
  const auto cut = [](float x) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xffffe000u);
  };
  for (int i = 0; i < 128; ++i) exact_a[i] = cut(a[i] = float(tests::uniform(1, 4, i) - 0.5));
  for (int i = 0; i < 64; ++i) {
    exact_b[i] = cut(b[i] = float(tests::uniform(1, 5, i) - 0.5));
    columns[i % 8 * 8 + i / 8] = b[i];
  }
  check_product(
      "ldmatrix(a, lane % 16 * 32 + lane / 16 * 16);\n"
      "ldmatrix(b, 512 + lane % 8 * 32 + lane / 8 % 2 * 16);\n"
      "mma_m16n8k8_tf32(d, a, b[0], b[1]);\n",
      exact_a, exact_b, 8, a.data(), columns.data());
}

TEST_CASE("conversions of 16-bit formats are those of the reference") {
  std::vector<float> given;
  for (std::uint32_t bits = 0; bits < 0x7f800000; bits += 0x7fff1) {
    given.push_back(std::bit_cast<float>(bits));
    given.push_back(-std::bit_cast<float>(bits));
  }
  for (std::uint32_t half = 0; half < 0x7c00; half += 3) {  // halfway between two numbers
    given.push_back((f16_to_f32(half) + f16_to_f32(half + 1)) / 2);
    given.push_back(std::bit_cast<float>(half << 16 | 0x8000));
  }
  given.push_back(std::numeric_limits<float>::infinity());
  std::vector<std::uint16_t> got(given.size() * 2);
  const std::string lines = "for (int i = thread_index(); i < " + std::to_string(given.size()) +
                            "; i += 32) {\n"
                            "  const float x = ((const float*)params.problem.q.data)[i];\n"
                            "  ((uint16*)params.problem.out.data)[2 * i] = narrow<F16>(x);\n"
                            "  ((uint16*)params.problem.out.data)[2 * i + 1] = narrow<Bf16>(x);\n"
                            "}\n";
  REQUIRE(run(lines, {}, given.data(), nullptr, got.data()) == "");
  int wrong = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    wrong += got[2 * i] != f64_to_f16(given[i]) || got[2 * i + 1] != f64_to_bf16(given[i]);
  }
  CHECK(wrong == 0);
}

TEST_CASE("shuffles and votes") {
  std::vector<int> out(64);
  const std::string lines =
      "const int t = thread_index();\n"
      "int x = shuffle_xor(t, 5) * 1000 + shuffle(t, (t + 1) % 32);\n"
      "if (any_in_warp(t == 40)) x += 1000000;\n"
      "if (any_in_block(t == 40)) x += 10000000;\n"
      "if (any_in_block(t == 64)) x += 100000000;\n"
      "((int*)params.problem.out.data)[t] = x;\n";
  for (const Order order : {Order::forward, Order::backward, Order::mixed}) {
    REQUIRE(run(lines, {.warps = 2}, nullptr, nullptr, out.data(), order) == "");
    for (int t = 0; t < 64; ++t) {
      const int from_xor = t ^ 5, next = t / 32 * 32 + (t + 1) % 32;
      CHECK(out[t] == from_xor * 1000 + next + (t >= 32) * 1000000 + 10000000);
    }
  }
}

TEST_CASE("a missing barrier is reported, whatever the order") {
  const std::string write = "store_shared_32(thread_index() * 4, 1);\n";
  const std::string read = "load_shared_32((thread_index() ^ 32) * 4);\n";
  const std::string near = "load_shared_32((thread_index() ^ 1) * 4);\n";
  check_fault(write + read, "without a sync_block", {.warps = 2});
  check_fault(write + "sync_warp();\n" + read, "without a sync_block", {.warps = 2});
  check_fault(write + near, "without a sync_warp", {.warps = 2});
  check_fault(write + "uint32 m[4]; ldmatrix(m, lane_index() * 16);\n", "without a sync_warp");
  check_fault(read + write, "without a sync_block", {.warps = 2});
  check_fault(
      "if (warp_index() == 0) load_shared_32(lane_index() * 4);\n"
      "else store_shared_32(lane_index() * 4, 1);\n",
      "has read, without a sync_block", {.warps = 2});
  CHECK(run(write + "sync_block();\n" + read + "sync_block();\n" + write, {.warps = 2}) == "");
  CHECK(run(write + "sync_warp();\n" + near + "sync_warp();\n" + write, {.warps = 2}) == "");
}

TEST_CASE("who arrives at a barrier of some threads does not wait there") {
  const std::string lines =
      "if (warp_index() == 0) {\n"
      "  load_shared_32(lane_index() * 4);\n"
      "  bar_arrive(3, 64);\n"
      "  bar_arrive(4, 64);\n"
      "} else {\n"
      "  bar_sync(3, 64);\n"
      "  store_shared_32(lane_index() * 4, 1);\n"
      "}\n";
  for (const Order order : {Order::forward, Order::backward, Order::mixed}) {
    CHECK(run(lines, {.warps = 2, .level = 90}, nullptr, nullptr, nullptr, order) == "");
  }
}

TEST_CASE("blocks of a cluster read each other's shared memory") {
  const Shape shape{.warps = 2, .blocks = 6, .level = 90, .cluster = 3};
  const std::string write =
      "const SharedAddress own = shared_address(&shared_memory<uint8>()) + thread_index() * 16;\n"
      "const uint32 mine = uint32(block_index() * 64 + thread_index());\n"
      "store_shared_128(own, {{mine, 0, 0, 0}});\n";
  const std::string read =
      "const int other = (cluster_rank() + 1) % 3;\n"
      "((uint32*)params.problem.out.data)[mine] =\n"
      "    load_cluster_128(address_in_cluster(own, other)).word[0];\n";
  std::vector<std::uint32_t> out(6 * 64);
  for (const Order order : {Order::forward, Order::backward, Order::mixed}) {
    std::fill(out.begin(), out.end(), 0);
    const auto go = [&](const std::string& between) {
      return run(write + between + read + "sync_cluster();\n", shape, nullptr, nullptr, out.data(),
                 order);
    };
    CHECK(go("sync_cluster();\n") == "");
    for (int block = 0; block < 6; ++block) {
      const int other = block / 3 * 3 + (block + 1) % 3;
      for (int t = 0; t < 64; ++t) REQUIRE(out[block * 64 + t] == unsigned(other * 64 + t));
    }
    CHECK(go("if (cluster_rank() == 0) sync_cluster(); else sync_block();\n") != "");
  }
  const std::string meet =
      "const SharedAddress barrier = shared_address(&shared_memory<uint8>());\n"
      "if (thread_index() == 0) mbarrier_init(barrier, 3);\nsync_cluster();\n"
      "if (thread_index() < 3) mbarrier_arrive_cluster(address_in_cluster(barrier, "
      "thread_index()));\n";
  CHECK(run(meet + "mbarrier_wait(barrier, 0);\nsync_cluster();\n", shape) == "");
  check_fault(
      meet + "mbarrier_wait(barrier, 1);\nmbarrier_wait(barrier, 0);\nmbarrier_wait(barrier, 1);",
      "never ends", shape);
  check_fault("load_cluster_128(address_in_cluster(0, 3));\n", "no such block", shape);
  check_fault("load_cluster_128(address_in_cluster(0, 2) + 4096);\n", "of 4096", shape);
  check_fault("uint32 x, y; load_cluster_64(address_in_cluster(0, 2) + 4096, x, y);\n", "of 4096",
              shape);
  check_fault("sync_cluster();\n", "in a grid of 4", {.blocks = 4, .level = 90, .cluster = 3});
}

TEST_CASE("copies arrive when they are waited for") {
  std::vector<float> from(64, 7.0f), out(64);
  const std::string copy =
      "const float* const from = (const float*)params.problem.q.data + thread_index();\n"
      "cp_async<4>(thread_index() * 4, from, 4);\ncp_async_commit();\n"
      "cp_async<4>(256 + thread_index() * 4, from, 0);\ncp_async_commit();\n";
  const std::string keep = "((float*)params.problem.out.data)[thread_index()] = ";
  const std::string plain = "(&shared_memory<float>())[thread_index()];\n";
  const std::string load = "float_of(load_shared_32(thread_index() * 4));\n";
  const auto go = [&](const std::string& lines) {
    return run(copy + lines, {}, from.data(), nullptr, out.data());
  };
  CHECK(go(keep + load).find("is under way") != std::string::npos);
  CHECK(go("cp_async_wait<2>();\n" + keep + load).find("is under way") != std::string::npos);
  CHECK(go(keep + plain) == "");
  CHECK(std::isnan(out[3]));
  CHECK(go("cp_async_wait<1>();\n" + keep + load) == "");
  CHECK(out[3] == 7);
  CHECK(go("cp_async_wait<0>();\n" + keep +
           "float_of(load_shared_32(256 + lane_index() * 4));\n") == "");
  CHECK(out[3] == 0);
}

TEST_CASE("divergence, bounds, alignment and turns that never come are reported") {
  check_fault("if (lane_index() < 3) sync_warp(); else sync_block();\n", "while lane");
  check_fault("if (lane_index() == 3) return;\nsync_warp();\n", "the kernel's end");
  check_fault("if (warp_index() == 1) return;\nsync_block();\n", "the kernel's end", {.warps = 2});
  check_fault("if (warp_index()) sync_block(); else any_in_block(true);\n", "any_in_block",
              {.warps = 2});
  check_fault("load_shared_32(4096);\n", "of 4096 of shared memory");
  check_fault("store_shared_128(8, {});\n", "not a multiple of 16");
  check_fault("uint32 m[4]; ldmatrix(m, 8);\n", "not a multiple of 16");
  check_fault("struct Big { char c[5000]; }; shared_memory<Big>();\n", "uses 5000 bytes");
  check_fault("alignas(16) char c[32]; load_global_128(c + 4);\n", "global memory");
  check_fault("int turn = 0; wait_semaphore(&turn, 1);\n", "a deadlock");
  check_fault("float d[4]; uint32 a[4] = {}; mma_m16n8k16<Bf16>(d, a, 0, 0);\n", "at this level",
              {.level = 75});
  check_fault("static volatile int zero = 0; volatile int64 x = block_index() % zero;\n",
              "by zero");
#if !defined(__SANITIZE_ADDRESS__)
  check_fault("volatile float x = *(const float*)(params.problem.q.strides.row + 64);\n",
              "which is nobody's");
#endif
  // The machine is whole again after a fault.
  CHECK(run("sync_block();\n", {.warps = 4, .blocks = 3}) == "");
}

TEST_CASE("SmallTanh is tanh to 2e-7 of the factor, and says where it is not") {
  constexpr int kCount = 1 << 14;
  const double factor = 2.5;
  std::vector<float> x(kCount), out(2 * kCount);
  for (int i = 0; i < kCount; ++i) x[i] = float(i - kCount / 2) / (kCount / 2);
  REQUIRE(run("const float* const x = static_cast<const float*>(params.problem.q.data);\n"
              "float* const out = static_cast<float*>(params.problem.out.data);\n"
              "const SmallTanh tanh(2.5f);\n"
              "for (int i = thread_index(); i < 1 << 14; i += 32) {\n"
              "  const float argument = x[i] * SmallTanh::kUnit;\n"
              "  out[2 * i] = tanh.add(argument, 0.0f);\n"
              "  out[2 * i + 1] = SmallTanh::is_large(bits_of(argument));\n"
              "}\n",
              {.header = "cuda/kernels/tile/wgmma/forward/small_tanh.cuh"}, x.data(), nullptr,
              out.data()) == "");
  for (int i = 0; i < kCount; ++i) {
    const bool large = std::fabs(x[i]) >= 0.875f;
    CHECK((out[2 * i + 1] != 0) == large);
    if (!large) CHECK(std::fabs(out[2 * i] - factor * std::tanh(double(x[i]))) < 2e-7 * factor);
  }
}

TEST_SUITE_END();
