// Plans for processors that need not exist, and what they say of themselves.
#include "plan/cpu/plan.hpp"

#include <doctest/doctest.h>

#include "problem/describe.hpp"

using namespace regard;

namespace {

const Processor kScalarOnly{.usable = {Isa::scalar}};
const Processor kNeon{.usable = {Isa::neon, Isa::scalar}};
const Processor kAvx2{.usable = {Isa::avx2, Isa::scalar}};
const Processor kAvx512{.usable = {Isa::avx512, Isa::avx2, Isa::scalar}};
const Processor kSlowBf16{.usable = {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::scalar}};
const Processor kQuickBf16{.usable = {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::scalar},
                           .bf16_dot_pays = true};
const Processor kSlowAmx{
    .usable = {Isa::amx, Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::scalar}};
const Processor kQuickAmx{.usable = kSlowAmx.usable, .amx_pays = true};

struct Shape {
  Type type = f32;
  std::int64_t batch = 2, heads_q = 8, heads_kv = 8, len_q = 1024, len_k = 1024, dim = 64,
               dim_v = 64;
};

Attention attention(const Shape& s) {
  return {.q = Tensor(nullptr, s.type, {s.batch, s.heads_q, s.len_q, s.dim}),
          .k = Tensor(nullptr, s.type, {s.batch, s.heads_kv, s.len_k, s.dim}),
          .v = Tensor(nullptr, s.type, {s.batch, s.heads_kv, s.len_k, s.dim_v})};
}

Problem problem(const Attention& a, Pass pass = Pass::forward) {
  return describe(a, pass, NullData::allowed);
}

Plan plan_for(Type type, const Processor& processor, const char* choice = "",
              Pass pass = Pass::forward) {
  return plan(problem(attention({.type = type}), pass), processor, {choice}, 1);
}

bool says(const Plan& plan, const char* words) {
  for (const char* reason : plan.reasons) {
    if (reason && std::string(reason).find(words) != std::string::npos) return true;
  }
  return false;
}

constexpr Type kTypes[] = {f64, f32, f16, bf16};

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("the widest instruction set is chosen") {
  for (Type type : kTypes) {
    CHECK(plan_for(type, kScalarOnly).name == "cpu:scalar");
    CHECK(plan_for(type, kNeon).name == "cpu:neon");
    CHECK(plan_for(type, kAvx2).name == "cpu:avx2");
    CHECK(plan_for(type, kAvx512).name == "cpu:avx512");
    CHECK(plan_for(type, kSlowBf16).name == "cpu:avx512");
  }
}

TEST_CASE("bf16 dot products are used for bf16, and only where they pay") {
  CHECK(plan_for(bf16, kQuickBf16).name == "cpu:avx512bf16");
  CHECK(plan_for(bf16, kQuickBf16).isa == Isa::avx512bf16);
  CHECK(says(plan_for(bf16, kQuickBf16), "faster than f32 FMA (measured)"));
  CHECK(says(plan_for(bf16, kSlowBf16), "slower than f32 FMA (measured)"));
  for (Type type : {f64, f32, f16}) CHECK(plan_for(type, kQuickBf16).name == "cpu:avx512");
}

TEST_CASE("tile products are used for bf16 and f16, and only where they pay") {
  CHECK(plan_for(bf16, kQuickAmx).name == "cpu:amx");
  CHECK(plan_for(bf16, kQuickAmx).isa == Isa::amx);
  CHECK(says(plan_for(bf16, kQuickAmx), "faster than f32 FMA (measured)"));
  CHECK(plan_for(bf16, kSlowAmx).name == "cpu:avx512");
  for (Type type : {f64, f32}) CHECK(plan_for(type, kQuickAmx).name == "cpu:avx512");
  CHECK(plan_for(f16, kQuickAmx).name == "cpu:amx");
  CHECK(plan_for(f16, kSlowAmx).name == "cpu:avx512");
  CHECK(plan_for(f16, kQuickAmx, "", Pass::backward).isa == Isa::amx);
  // A dout of f32 has more digits than two terms.
  Problem p = problem(attention({.type = f16}), Pass::backward);
  p.dout.type = f32;
  CHECK(plan(p, kQuickAmx, {}, 1).name == "cpu:avx512");
  CHECK(says(plan(p, kQuickAmx, {}, 1), "two terms would round a dout of f32"));
  const Plan forced = plan(p, kQuickAmx, {.name = "cpu:amx"}, 1);
  CHECK(forced.isa == Isa::avx512);
  CHECK(says(forced, "two terms would round a dout of f32"));
  // The workspace is asked for before dout is known. A window has lower blocks in f32 arithmetic,
  // and so more semaphores, which are most of what differs for many heads.
  Attention many = attention({.type = f16,
                              .batch = 64,
                              .heads_q = 128,
                              .heads_kv = 128,
                              .len_q = 1920,
                              .len_k = 1920,
                              .dim = 8,
                              .dim_v = 8});
  many.window.left = 64;
  Problem unknown = problem(many, Pass::backward), wide = unknown;
  wide.dout.type = f32;
  CHECK(plan(wide, kQuickAmx, {}, 1).workspace.size <=
        plan(unknown, kQuickAmx, {}, 1).workspace.size);
  // Short sequences, unless others may be longer.
  const Attention few = attention({.type = f16, .len_q = 255, .len_k = 256});
  CHECK(plan(problem(few, Pass::backward), kQuickAmx, {}, 1).name == "cpu:avx512");
  CHECK(plan(problem(few), kQuickAmx, {}, 1).name == "cpu:amx");
}

TEST_CASE("any instruction set that is there can be forced") {
  for (Type type : kTypes) {
    for (Isa isa : kSlowAmx.usable) {
      for (Pass pass : {Pass::forward, Pass::backward}) {
        const std::string name = std::string("cpu:") + name_of(isa);
        const Plan forced = plan_for(type, kSlowAmx, name.c_str(), pass);
        CHECK(forced.supported());
        CHECK(forced.name == name);
        CHECK(forced.isa == kernels_for(isa, type));  // 1024 tokens
        CHECK(says(forced, "asked for by name"));
      }
    }
  }
  CHECK(plan_for(bf16, kSlowBf16, "cpu:avx512bf16").isa == Isa::avx512bf16);
  CHECK(plan_for(f32, kSlowBf16, "cpu:avx512bf16").isa == Isa::avx512);
  CHECK(says(plan_for(f32, kSlowBf16, "cpu:avx512bf16"), "has kernels for bf16 only"));
  CHECK(says(plan_for(f32, kQuickAmx, "cpu:amx"), "amx has kernels for bf16 and f16"));
  CHECK(plan_for(f32, kAvx2, "cpu").name == "cpu:avx2");
}

TEST_CASE("what is not there is refused with a reason") {
  const auto refusal = [](const Processor& processor, const char* choice) {
    const Plan refused = plan_for(f32, processor, choice);
    CHECK(!refused.supported());
    CHECK(kernel_line(problem(attention({})), refused) == "none");
    return refused.refusal;
  };
  const std::string missing =
      "this processor or its operating system does not offer the instruction set";
  const std::string unknown = "no backend has this name; \"regard info\" lists them";
  CHECK(refusal(kScalarOnly, "cpu:avx2") == missing);
  CHECK(refusal(kNeon, "cpu:avx2") == missing);
  CHECK(refusal(kAvx512, "cpu:neon") == missing);
  CHECK(refusal(kAvx2, "cpu:avx512") == missing);
  CHECK(refusal(kAvx512, "cpu:avx512bf16") == missing);
  CHECK(refusal(kQuickBf16, "cpu:amx") == missing);
  CHECK(refusal(kAvx512, "cpu:") == unknown);
  CHECK(refusal(kAvx512, "cpu:AVX2") == unknown);
  CHECK(refusal(kAvx512, "gpu") == unknown);
  CHECK(refusal(kAvx512, "cuda:0") == "is for GPUs, and the device is the CPU");
}

TEST_CASE("the reference serves every type and needs no workspace") {
  for (Type type : kTypes) {
    const Plan reference = plan_for(type, kAvx2, "reference");
    CHECK(reference.backend == BackendKind::reference);
    CHECK(reference.name == "reference");
    CHECK(reference.workspace.size == 0);
  }
}

TEST_CASE("a plan is a pure function") {
  for (Pass pass : {Pass::forward, Pass::backward}) {
    for (Type type : kTypes) {
      const Problem p = problem(attention({.type = type, .len_q = 3}), pass);
      const Plan one = plan(p, kQuickBf16, {""}, 4), two = plan(p, kQuickBf16, {""}, 4);
      CHECK(explanation(p, one) == explanation(p, two));
      CHECK(one.workspace.size == two.workspace.size);
    }
  }
}

TEST_CASE("tiles depend on neither batch, heads nor threads, and forward ones not on lengths") {
  for (Pass pass : {Pass::forward, Pass::backward}) {
    for (const Processor& processor : {kScalarOnly, kNeon, kAvx2, kAvx512, kQuickBf16, kQuickAmx}) {
      for (std::int64_t dim : {1, 64, 300}) {
        const auto tiling = [&](Shape s, int workers) {
          s.dim = s.dim_v = dim;
          return plan(problem(attention(s), pass), processor, {""}, workers).tiling;
        };
        const CpuTiling want = tiling({.type = bf16}, 1);
        const std::int64_t long_q = pass == Pass::forward ? 100000 : 2047;
        for (const CpuTiling& got :
             {tiling({.type = bf16}, 9), tiling({.type = bf16, .batch = 1}, 1),
              tiling({.type = bf16, .heads_q = 64}, 1), tiling({.type = bf16, .len_k = 7}, 1),
              tiling({.type = bf16, .len_q = long_q}, 1)}) {
          CHECK(got.shape == want.shape);
          // Tasks of tile products may have more rows, which changes no bit of a result.
          if (pass == Pass::backward || !want.shape.tiles) CHECK(got.block_q == want.block_q);
          CHECK(got.block_k == want.block_k);
          CHECK(got.chunk_k == want.chunk_k);
        }
        CHECK(want.block_q % want.shape.panel() == 0);
        CHECK(want.chunk_k % want.block_k == 0);
        CHECK(want.block_k % want.shape.pack == 0);
      }
    }
  }
}

TEST_CASE("forward: tasks of tile products have more rows where workers have eight tasks each") {
  const auto rows = [](std::int64_t heads, std::int64_t length, std::int64_t dim, int workers) {
    const Attention a = attention({.type = bf16,
                                   .batch = 1,
                                   .heads_q = heads,
                                   .heads_kv = heads,
                                   .len_q = length,
                                   .len_k = length,
                                   .dim = dim,
                                   .dim_v = dim});
    return plan(problem(a, Pass::forward), kQuickAmx, {""}, workers).tiling.block_q;
  };
  CHECK(rows(16, 2048, 64, 1) == 1024);
  CHECK(rows(16, 2048, 64, 4) == 1024);
  CHECK(rows(16, 2048, 64, 5) == 512);
  CHECK(rows(16, 2048, 64, 16) == 256);
  CHECK(rows(1, 8192, 64, 2) == 512);
  CHECK(rows(1, 8192, 64, 16) == 256);
  CHECK(rows(1000, 300, 64, 1) == 512);  // no more than hold a sequence
  CHECK(rows(16, 2048, 256, 1) == 512);  // as many as the second cache holds
  CHECK(rows(16, 2048, 512, 1) == 256);
}

TEST_CASE(
    "backward: long sequences have longer chunks of keys, and blocks of rows except in windows") {
  const auto tiling = [](std::int64_t length, std::int64_t dim, Window window = {}) {
    Attention a =
        attention({.type = bf16, .len_q = length, .len_k = length, .dim = dim, .dim_v = dim});
    a.window = window;
    return plan(problem(a, Pass::backward), kQuickBf16, {""}, 1).tiling;
  };
  CHECK(tiling(1536, 64).chunk_k == 256);
  CHECK(tiling(1537, 64).chunk_k == 384);
  CHECK(tiling(100000, 64).chunk_k == 512);
  CHECK(tiling(100000, 128).chunk_k == 384);
  CHECK(tiling(100000, 256).chunk_k == 128);
  for (const std::int64_t length : {1537, 2000, 2305, 3000, 100000}) {
    for (const std::int64_t dim : {16, 64, 100, 128, 200, 300}) {
      const Attention a =
          attention({.type = bf16, .len_q = length, .len_k = length, .dim = dim, .dim_v = dim});
      for (const Processor& processor :
           {kScalarOnly, kNeon, kAvx2, kAvx512, kQuickBf16, kQuickAmx}) {
        const CpuTiling t = plan(problem(a, Pass::backward), processor, {""}, 1).tiling;
        CHECK(t.chunk_k % t.block_k == 0);  // scratch memory is for so many
        const KeyChunks chunks(t, length);
        for (std::int64_t chunk = 0; chunk < chunks.count; ++chunk) {
          CHECK(chunks.keys(chunk).end - chunks.keys(chunk).begin <= t.chunk_k);
        }
      }
    }
  }
  CHECK(tiling(2047, 64).block_q == 64);
  CHECK(tiling(2048, 64).block_q == 128);
  CHECK(tiling(100000, 64, {.left = 300, .right = 0}).block_q == 64);
  CHECK(tiling(100000, 64, {.left = 2048, .right = 0}).block_q == 128);
  // The longest of a packed batch chooses nothing.
  Attention packed;
  packed.q = packed.k = packed.v = Tensor(nullptr, bf16, {9000, 2, 64});
  packed.cu_seqlens_q = packed.cu_seqlens_k = Tensor(nullptr, i32, {3});
  packed.max_seqlen_q = packed.max_seqlen_k = 8000;
  const CpuTiling t = plan(problem(packed, Pass::backward), kQuickBf16, {""}, 1).tiling;
  CHECK(t.chunk_k == 256);
  CHECK(t.block_q == 64);
}

TEST_CASE("forward on AMX: tasks have more rows where they are many, and causal ones fewer") {
  const auto rows = [](std::int64_t length, int workers, Type type, Causal causal, Window window) {
    Attention a = attention({.type = type,
                             .batch = 1,
                             .heads_q = 16,
                             .heads_kv = 16,
                             .len_q = length,
                             .len_k = length,
                             .dim = 64,
                             .dim_v = 64});
    a.causal = causal;
    a.window = window;
    return plan(problem(a), kQuickAmx, {}, workers).tiling.block_q;
  };
  const Causal causal = Causal::bottom_right;
  CHECK(rows(512, 16, bf16, Causal::none, {}) == 256);
  CHECK(rows(2048, 2, bf16, Causal::none, {}) == 1024);
  CHECK(rows(512, 16, bf16, causal, {}) == 128);
  CHECK(rows(512, 8, bf16, causal, {}) == 256);
  CHECK(rows(512, 16, f16, causal, {}) == 256);
  CHECK(rows(512, 16, bf16, causal, {.left = 64}) == 256);  // rows see as many keys
}

TEST_CASE("workspace: a task of f16 by terms has room for f32 arithmetic in its place") {
  for (std::int64_t dim : {1, 8, 31, 32, 33, 64, 100, 128, 256, 500}) {
    for (std::int64_t dim_v : {1, 17, 64, 96, 300}) {
      for (std::int64_t len : {1, 40, 128, 1000, 5000}) {
        const Attention a = attention({.type = f16, .len_k = len, .dim = dim, .dim_v = dim_v});
        const CpuTiling terms = plan(problem(a), kQuickAmx, {}, 1).tiling;
        REQUIRE(terms.shape.terms == 2);
        CpuTiling whole = terms;
        whole.shape = shape_of(Isa::avx512, f16);
        const HeadSizes sizes{dim, dim_v};
        CHECK(forward_scratch(whole, sizes).size <= forward_scratch(terms, sizes).size);
        CHECK(partial_layout(whole, sizes).size == partial_layout(terms, sizes).size);
      }
    }
  }
}

TEST_CASE("workspace: the scratch of every worker, and no more than O(S)") {
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const auto size = [&](std::int64_t length, int workers) {
      const Shape s{.batch = 1, .heads_q = 1, .heads_kv = 1, .len_q = length, .len_k = length};
      return plan(problem(attention(s), pass), kAvx512, {""}, workers).workspace;
    };
    const CpuWorkspace one = size(1024, 1), three = size(1024, 3);
    CHECK(three.size - one.size == 2 * one.scratch_size);
    const std::int64_t growth = size(65536, 1).size - one.size;
    CHECK(growth <= (65536 - 1024) * std::int64_t(2 * 64 * 4));
  }
}

TEST_CASE("golden explanations") {
  const auto text = [](Attention a, Pass pass, const Processor& processor, const char* choice) {
    const Problem p = problem(a, pass);
    return explanation(p, plan(p, processor, {choice}, 4));
  };
  const std::string forward = text(attention({}), Pass::forward, kAvx512, "");
  CHECK(
      forward.starts_with("problem    2 x 8 heads, 1024 x 1024, D 64, f32, forward\n"
                          "backend    cpu:avx512\n"
                          "  because  the widest instruction set that this processor has\n"
                          "kernel     forward avx512, f32 arithmetic, tile 128 x 128, panel 32\n"
                          "workers    4\n"
                          "workspace  "));
  CHECK(forward.ends_with(" for each worker\n"));

  Attention a = attention({.type = bf16, .heads_q = 32, .heads_kv = 8, .dim = 128, .dim_v = 96});
  a.causal = Causal::bottom_right;
  a.sink = Tensor(nullptr, f32, {32});
  CHECK(text(a, Pass::backward, kQuickBf16, "")
            .starts_with("problem    2 x 32/8 heads, 1024 x 1024, D 128 Dv 96, bf16, causal bottom "
                         "right, sink, backward\n"
                         "backend    cpu:avx512bf16\n"
                         "  because  the widest instruction set that this processor has; its bf16 "
                         "dot products are faster than f32 FMA (measured)\n"
                         "kernel     backward avx512bf16, bf16 dot products summed in f32, tile 64 "
                         "x 64, panel 32, chunks up to 256\n"
                         "mask       50.0 % of the pairs are visible; tiles without any are "
                         "skipped\n"));
  CHECK(text(a, Pass::forward, kSlowBf16, "").find("bf16 converted as it is read") !=
        std::string::npos);

  const Attention decode = attention({.heads_q = 8, .heads_kv = 1, .len_q = 1, .len_k = 32768});
  CHECK(text(decode, Pass::forward, kAvx2, "")
            .find("split      few queries, many keys: chunks of "
                  "4096 keys, merged in order\n") != std::string::npos);
  CHECK(text(decode, Pass::forward, kAvx2, "")
            .find("few rows   sequences of at most 1 query read keys and values row by row, "
                  "without panels\n") != std::string::npos);
  CHECK(text(decode, Pass::backward, kAvx2, "")
            .find("few rows   sequences of at most 1 query have panels of 8\n") !=
        std::string::npos);
  CHECK(text(decode, Pass::backward, kAvx2, "cpu:scalar").find("few rows") == std::string::npos);
  const Attention five = attention({.heads_q = 8, .heads_kv = 4, .len_q = 5, .len_k = 100});
  CHECK(text(five, Pass::forward, kAvx2, "").find("few rows") == std::string::npos);
  CHECK(text(decode, Pass::forward, kSlowBf16, "cpu:scalar").find("few rows") == std::string::npos);
  CHECK(text(attention({}), Pass::forward, kAvx2, "cpu:avx512") ==
        "problem    2 x 8 heads, 1024 x 1024, D 64, f32, forward\n"
        "backend    none: this processor or its operating system does not offer the instruction "
        "set\n");
  CHECK(text(attention({.type = f64}), Pass::forward, kAvx2, "reference") ==
        "problem    2 x 8 heads, 1024 x 1024, D 64, f64, forward\n"
        "backend    reference\n"
        "  because  asked for by name: the textbook in float64, one row at a time\n"
        "kernel     forward rows in f64\n");
}

TEST_CASE("explain: pairs and FLOP") {
  Attention a = attention(
      {.batch = 3, .heads_q = 4, .heads_kv = 2, .len_q = 5, .len_k = 9, .dim = 7, .dim_v = 3});
  a.causal = Causal::bottom_right;  // rows see 5 to 9 keys
  const Explanation e = explain(a, Pass::forward);
  CHECK(e.pairs == 3 * 4 * (5 + 6 + 7 + 8 + 9));
  CHECK(e.flops == e.pairs * 2 * (7 + 3));
  CHECK(explain(a, Pass::backward).flops == e.pairs * 2 * (3 * 7 + 2 * 3));
}

TEST_SUITE_END();
