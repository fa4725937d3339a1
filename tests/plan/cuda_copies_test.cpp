// Which inputs are copied before kernels load them.
#include "plan/cuda/input_copies.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("what TMA cannot load is copied first, where keys are many") {
  const auto copied = [](const Problem& p) {
    const CudaPlan plan = planned(p);
    const CudaLaunch* const copies = launch_of(plan, Kernel::copy_inputs);
    CHECK((copies != nullptr) == !plan.copies.empty());
    CHECK((copies == nullptr || copies == &plan.launches.front()));
    std::string names;
    for (int n = 0; n < kInputs; ++n) names += plan.copies.has(Input(n)) ? "qkvo"[n] : '-';
    return (plan.family == Family::wgmma ? "" : "not wgmma ") + names;
  };
  Problem p = problem(attention({.len_q = 1024, .len_k = 1024}));
  CHECK(copied(p) == "----");
  p.k.strides.row = 68;
  CHECK(copied(p) == "-k--");
  CHECK(says(planned(p), "copied first: k: TMA cannot load"));
  p.v.strides.head = 0;
  CHECK(copied(p) == "-kv-");
  p.q.strides.row = -64;
  CHECK(copied(p) == "qkv-");
  p.v.data = reinterpret_cast<void*>(8);  // of a copied input it does not count
  CHECK(copied(p) == "qkv-");
  p.sizes.len_k = 200;
  CHECK(copied(p) == "not wgmma ----");
  CHECK(says(planned(p), "so few keys do not repay copies"));
  CHECK(planned(p, "sm_90", "cuda:wgmma").copies.has(Input::q));
  // Where data lies is not known when a workspace is asked for.
  p = problem(attention({.len_q = 1024, .len_k = 1024}));
  p.k.data = reinterpret_cast<void*>(8);
  CHECK(copied(p) == "not wgmma ----");
  p = problem(attention({.len_q = 1024, .len_k = 1024, .dim = 33}), Pass::backward);
  CHECK(copied(p) == "qkv-");
  p = problem(attention({.len_q = 1024, .len_k = 1024}), Pass::backward);
  p.dout = {.data = reinterpret_cast<void*>(4), .type = f32, .strides = p.q.strides};
  CHECK(copied(p) == "---o");
  p = problem(attention({.type = f32, .len_q = 1024, .len_k = 1024, .dim = 33}));
  CHECK(copied(p) == "----");
}

TEST_CASE("mma: rows that do not begin at 16 bytes are copied first, where they are many") {
  const auto copied = [](const Problem& p) {
    const CudaPlan plan = planned(p, "sm_80");
    check_sound(p, chip("sm_80"), plan);
    std::string names;
    for (int n = 0; n < kInputs; ++n) names += plan.copies.has(Input(n)) ? "qkvo"[n] : '-';
    const Kernel main = p.backward ? Kernel::backward : Kernel::forward;
    return names + (launch_of(plan, main)->config.aligned ? "" : ", not aligned");
  };
  Problem p = problem(attention({.len_q = 1024, .len_k = 1024, .dim = 64}));
  CHECK(copied(p) == "----");
  p.v.strides.head = 0;  // which mma reads as well as any other
  p.k.strides.row = 68;
  CHECK(copied(p) == "-k--");
  CHECK(says(planned(p, "sm_80"), "copied first: k: rows that do not begin at multiples of 16"));
  p.q.data = reinterpret_cast<void*>(8);
  CHECK(copied(p) == "----, not aligned");
  CHECK(copied(problem(attention({.len_q = 127, .len_k = 1024, .dim = 33}))) ==
        "----, not aligned");
  CHECK(copied(problem(attention({.len_q = 1024, .len_k = 255, .dim = 33}))) ==
        "----, not aligned");
  CHECK(copied(problem(attention({.type = f32, .len_q = 1024, .len_k = 1024, .dim = 33}))) ==
        "----, not aligned");
  // A dout that is not known yet has room, and one alone is not copied.
  p = problem(attention({.len_q = 1024, .len_k = 1024, .dim = 33}), Pass::backward);
  CHECK(copied(p) == "qkv-");
  const std::int64_t size = planned(p, "sm_80").workspace.size;
  p.dout = {.data = nullptr, .type = p.type, .strides = p.q.strides};
  CHECK(copied(p) == "qkvo");
  CHECK(planned(p, "sm_80").workspace.size <= size);
  p.dout.type = f32;
  CHECK(copied(p) == "----, not aligned");
  p.dout.strides.row = 36;
  CHECK(copied(p) == "qkv-");
  p = problem(attention({.len_q = 1024, .len_k = 1024, .dim = 64}), Pass::backward);
  p.dout = {.data = nullptr, .type = p.type, .strides = p.q.strides};
  p.dout.strides.row = 68;
  CHECK(copied(p) == "----, not aligned");
}

TEST_CASE("copies of broadcast keys stay within what else there is") {
  Problem p = problem(attention(
      {.batch = 64, .heads_q = 32, .heads_kv = 32, .len_q = 128, .len_k = 4096, .dim = 128}));
  p.k.strides.batch = p.k.strides.head = p.v.strides.batch = p.v.strides.head = 0;
  CHECK(says(planned(p), "copies of broadcast keys and values would be many times"));
  CHECK(planned(p).workspace.size < 1 << 20);
  // Those of as many queries are.
  p = problem(attention({.batch = 4, .heads_q = 32, .heads_kv = 32, .len_q = 4096, .len_k = 4096}));
  p.k.strides.head = p.v.strides.head = 0;
  CHECK(planned(p).copies.has(Input::k));
}

TEST_CASE("a workspace asked for by the pass alone is enough for any dout") {
  for (const std::int64_t dim : {33, 64}) {
    Problem p = problem(attention({.len_q = 1024, .len_k = 1024, .dim = dim}), Pass::backward);
    const std::int64_t size = planned(p).workspace.size;
    p.dout = {.data = nullptr, .type = p.type, .strides = p.q.strides};
    CHECK(planned(p).workspace.size <= size);
    p.dout.strides = {};  // the gradient of a sum
    CHECK(planned(p).copies.has(Input::dout));
    CHECK(planned(p).workspace.size <= size);
    p.dout = {.data = nullptr, .type = f32, .strides = p.q.strides};
    CHECK(planned(p).copies.has(Input::dout));
    CHECK(planned(p).workspace.size <= size);
  }
}

TEST_SUITE_END();
