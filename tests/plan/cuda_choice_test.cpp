// What a caller may force of a GPU plan, and what is refused with a reason.
#include "plan/cuda/kernel/mma_layout.h"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

std::string why_not(const std::string& name) {
  CudaChoice choice;
  std::string why;
  CHECK(!parse_cuda_choice(name, choice, why));
  return why;
}

std::string refusal(const Problem& p, const char* chip_name, const std::string& name = "") {
  const CudaPlan plan = planned(p, chip_name, name);
  CHECK(!plan.supported());
  CHECK(plan.launches.empty());
  CHECK(cuda_kernel_line(plan) == "none");
  CHECK(cuda_explanation(p, chip(chip_name), plan).find("none: " + plan.refusal) !=
        std::string::npos);
  return plan.refusal;
}

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("choices by name") {
  for (const char* name : {"", "cuda"}) {
    CHECK(choice(name).any_family);
    CHECK(choice(name).level == 0);
    CHECK(choice(name).shared == 0);
    CHECK(!choice(name).has_tiling);
  }
  CHECK(!choice("cuda:simt").any_family);
  CHECK(choice("cuda:simt").family == Family::simt);
  CHECK(choice("cuda:mma").family == Family::mma);
  CHECK(choice("cuda:mma").level == 0);
  CHECK(choice("cuda:mma75").level == 75);
  CHECK(choice("cuda:mma80").level == 80);
  CHECK(choice("cuda:mma90").level == 90);
  CHECK(choice("cuda:mma/99").shared == 99 * 1024);
  CHECK(choice("cuda/64").any_family);
  const CudaChoice all =
      choice("cuda:mma80/163@rows=64,keys=128,warps=8,stages=2,slices=1,key_warps=1,min_blocks=3");
  CHECK(all.level == 80);
  CHECK(all.shared == 163 * 1024);
  CHECK(all.tiling == Tiling{.rows = 64, .keys = 128, .warps = 8, .stages = 2, .min_blocks = 3});
  CHECK(choice("cuda@rows=64").tiling.rows == 64);
  CHECK(choice("cuda@rows=64").tiling.keys == 0);
}

TEST_CASE("wrong names are refused with a reason") {
  for (const char* name : {"cpu", "cuda:", "cuda:0", "cuda:MMA", "cuda:mma70", "cuda:mma ", "cud",
                           "cudaa", "cuda:simt80", ":mma", "/99", "@rows=64"}) {
    CAPTURE(std::string(name));
    CHECK(why_not(name) == "no backend has this name; \"regard info\" lists them");
  }
  for (const char* name : {"cuda:mma/", "cuda:mma/99KB", "cuda/0", "cuda/-1", "cuda/99999"}) {
    CHECK(why_not(name).find("kilobytes") != std::string::npos);
  }
  CHECK(why_not("cuda:mma@").find("must follow the @") != std::string::npos);
  for (const char* name : {"cuda@row=1", "cuda@rows", "cuda@rows=", "cuda@rows=0", "cuda@rows=1e9",
                           "cuda@rows=64,", "cuda@rows=64;keys=64", "cuda@rows=64,,keys=64"}) {
    CAPTURE(std::string(name));
    if (std::string(name) == "cuda@rows=64,") continue;  // a last comma does no harm
    CHECK(why_not(name).find("no part of a tiling") != std::string::npos);
  }
}

TEST_CASE("families: tensor cores wherever they multiply the type") {
  const auto name = [](Type type, const char* chip_name) {
    return planned(problem(attention({.type = type})), chip_name).name();
  };
  for (const char* old : {"sm_50", "sm_52", "sm_60", "sm_61", "sm_70"}) {
    for (Type type : {f64, f32, f16, bf16}) CHECK(name(type, old) == "cuda:simt");
  }
  CHECK(name(f16, "sm_75") == "cuda:mma");
  CHECK(name(bf16, "sm_75") == "cuda:simt");
  CHECK(name(f32, "sm_75") == "cuda:simt");
  for (const char* chip_name :
       {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"}) {
    const bool hopper = std::string(chip_name) == "sm_90";
    for (Type type : {f32, f16, bf16}) {
      CHECK(name(type, chip_name) == (hopper ? "cuda:wgmma" : "cuda:mma"));
    }
    CHECK(name(f64, chip_name) == "cuda:simt");
  }
  CHECK(says(planned(problem(attention({.type = bf16})), "sm_75"), "7.5 multiply f16 only"));
  CHECK(says(planned(problem(attention({.type = f64}))), "f64 is computed without tensor cores"));
  CHECK(says(planned(problem(attention({.type = f16, .dim = 512}), Pass::backward), "sm_75"),
             "no tile of these head sizes fits"));
}

TEST_CASE("Hopper's own forward kernel takes a bias and a mask, except a bias of keys") {
  const auto chosen = [](auto&& set) {
    Attention a = attention({.type = bf16, .batch = 8, .dim = 128});
    set(a);
    return planned(problem(a));
  };
  const auto sized = [](std::initializer_list<std::int64_t> sizes) {
    return [sizes](Attention& a) { a.bias = Tensor(nullptr, bf16, sizes); };
  };
  CHECK(chosen(sized({1, 8, 1024, 1024})).name() == "cuda:wgmma");
  CHECK(chosen([](Attention& a) {
          a.mask = Tensor(nullptr, boolean, {1, 1, 1024, 1024});
        }).name() == "cuda:wgmma");
  CHECK(says(chosen(sized({8, 1, 1, 1024})), "read a bias that all queries share once"));
}

TEST_CASE("f32 backward: a split into hi and lo parts for many rows, however many") {
  const auto family = [](std::int64_t rows, std::int64_t heads) {
    return planned(problem(attention({.type = f32,
                                      .heads_q = heads,
                                      .heads_kv = heads,
                                      .len_q = rows,
                                      .len_k = 65536,
                                      .dim = 64}),
                           Pass::backward))
        .family;
  };
  CHECK(family(65536, 2) == Family::wgmma);
  CHECK(family(128, 2) == Family::mma);
  CHECK(says(
      planned(problem(attention({.type = f32, .len_q = 1}), Pass::backward), "sm_90", "cuda:wgmma"),
      "so few query rows do not repay the split"));
}

TEST_CASE("Hopper's own forward kernel takes f32 in two parts, except few rows") {
  const auto chosen = [](const Shape& shape, const char* backend = "") {
    Shape s = shape;
    s.type = f32;
    return planned(problem(attention(s)), "sm_90", backend);
  };
  CHECK(chosen({.dim = 128}).name() == "cuda:wgmma");
  CHECK(says(chosen({.dim = 64}), "f16x3: three f16 products"));
  CHECK(chosen({.dim = 17, .dim_v = 33}).name() == "cuda:wgmma");  // rows that begin anywhere
  CHECK(chosen({.dim = 136}).name() == "cuda:wgmma");
  CHECK(chosen({.dim = 64, .dim_v = 256}).name() == "cuda:wgmma");
  CHECK(says(chosen({.dim = 257}), "no tile for head sizes of f32 above 256"));
  CHECK(says(chosen({.batch = 64, .len_q = 128}), "do not repay the split"));
  CHECK(chosen({.batch = 64, .heads_kv = 2, .len_q = 128}).name() == "cuda:wgmma");
  CHECK(says(chosen({.batch = 1, .heads_q = 4, .heads_kv = 4}), "multiprocessors idle"));
  CHECK(chosen({.batch = 64, .len_q = 128}, "cuda:wgmma").name() == "cuda:wgmma");
  Attention a = attention({.type = f32});
  a.precision = Precision::tf32;
  CHECK(says(planned(problem(a)), "compute f32 in full precision only"));
}

TEST_CASE("f32 above head sizes of 128 prefers Hopper's own kernel also for fewer rows") {
  const auto chosen = [](const Shape& shape) {
    Shape s = shape;
    s.type = f32;
    return planned(problem(attention(s)));
  };
  constexpr const char* kFewRows = "do not repay the split";
  CHECK(says(chosen({.batch = 16, .len_q = 64, .dim = 256}), kFewRows));
  CHECK(chosen({.batch = 16, .len_q = 65, .dim = 256}).name() == "cuda:wgmma");
  CHECK(chosen({.batch = 64, .len_q = 65, .dim = 64, .dim_v = 136}).name() == "cuda:wgmma");
  CHECK(says(chosen({.batch = 64, .len_q = 64, .dim = 64, .dim_v = 136}), kFewRows));
  CHECK(says(chosen({.batch = 8, .len_q = 97, .dim = 64, .dim_v = 136}), kFewRows));
  // 16 and 40 tiles for 132 multiprocessors.
  CHECK(
      says(chosen({.batch = 1, .heads_q = 2, .heads_kv = 2, .dim = 256}), "multiprocessors idle"));
  CHECK(chosen({.batch = 1, .heads_q = 5, .heads_kv = 5, .dim = 256}).name() == "cuda:wgmma");
  // Too few keys to share out.
  CHECK(chosen({.batch = 1, .heads_q = 2, .heads_kv = 2, .len_k = 256, .dim = 256}).name() ==
        "cuda:wgmma");
}

TEST_CASE("f32 above head sizes of 128: fewer keys a tile where a bias needs the room") {
  const auto tiling = [](std::int64_t dim, std::int64_t dim_v, bool bias, bool mask,
                         double dropout) {
    Attention a = attention({.type = f32, .dim = dim, .dim_v = dim_v});
    if (bias) a.bias = Tensor(nullptr, f32, {1, 8, 1024, 1024});
    if (mask) a.mask = Tensor(nullptr, boolean, {2, 1, 1024, 1024});
    a.dropout.p = dropout;
    const CudaPlan plan = planned(problem(a));
    REQUIRE(plan.name() == "cuda:wgmma");
    const KernelConfig& c = launch_of(plan, Kernel::forward)->config;
    CHECK(stages_bias(c) == bias);
    CHECK(c.mask.as_bits == mask);
    return std::pair(c.tiling.keys, c.tiling.stages);
  };
  CHECK(tiling(256, 256, false, false, 0) == std::pair(32, 1));
  CHECK(tiling(256, 256, true, true, 0.1) == std::pair(32, 1));
  CHECK(tiling(224, 224, false, false, 0) == std::pair(48, 1));
  CHECK(tiling(224, 224, false, false, 0.1) == std::pair(32, 1));
  CHECK(tiling(256, 64, false, false, 0) == std::pair(64, 1));
  CHECK(tiling(192, 192, false, false, 0.1) == std::pair(64, 1));
  CHECK(tiling(192, 192, true, true, 0) == std::pair(48, 1));
  CHECK(tiling(192, 192, true, true, 0.1) == std::pair(32, 2));
  CHECK(tiling(64, 192, false, false, 0) == std::pair(64, 2));
  CHECK(tiling(128, 256, false, false, 0) == std::pair(32, 2));
}

TEST_CASE("gradients of f32 in two parts: two warpgroups of keys, or one each for dv and dk") {
  const auto backward = [](const Shape& shape, auto&& set) {
    Shape f32_shape = shape;
    f32_shape.type = f32;
    Attention a = attention(f32_shape);
    set(a);
    Problem p = problem(a, Pass::backward);
    p.gradients_named = true;  // without dbias
    p.dq = p.q;
    p.dk = p.k;
    p.dv = p.v;
    return planned(p);
  };
  const auto nothing = [](Attention&) {};
  const auto keys_of = [](const CudaPlan& plan) {
    const CudaLaunch* const launch = launch_of(plan, Kernel::backward);
    return launch && launch->config.products == Products::f16x3 ? launch->config.tiling.keys : 0;
  };
  CHECK(keys_of(backward({.dim = 64}, nothing)) == 128);
  CHECK(keys_of(backward({.dim = 17, .dim_v = 33}, nothing)) == 128);  // rows that begin anywhere
  CHECK(keys_of(backward({.dim = 128}, nothing)) == 64);
  CHECK(keys_of(backward({.dim = 64, .dim_v = 72}, nothing)) == 64);
  CHECK(says(backward({.dim = 136}, nothing), "no tile for head sizes of f32 above 128"));
  CHECK(says(backward({.len_q = 128}, nothing), "do not repay the split"));
  const auto mask = [](Attention& a) { a.mask = Tensor(nullptr, boolean, {1024, 1024}); };
  const auto bias = [](Attention& a) { a.bias = Tensor(nullptr, f32, {1, 8, 1024, 1024}); };
  CHECK(keys_of(backward({.dim = 64}, mask)) == 64);
  CHECK(keys_of(backward({.dim = 64}, bias)) == 64);
  CHECK(says(backward({.dim = 128}, bias), "no tile of the wgmma kernels fits"));
  Attention a = attention({.type = f32, .dim = 64});
  bias(a);
  CHECK(says(planned(problem(a, Pass::backward)), "f32 has no gradient of the bias"));
  a = attention({.type = f32});
  a.precision = Precision::tf32;
  CHECK(says(planned(problem(a, Pass::backward)), "compute f32 in full precision only"));
}

TEST_CASE("Hopper's own kernel makes the backward pass, except what it has no room for") {
  const auto backward = [](const Shape& shape, auto&& set) {
    Attention a = attention(shape);
    set(a);
    Problem p = problem(a, Pass::backward);
    p.gradients_named = true;  // without dbias
    p.dq = p.q;
    p.dk = p.k;
    p.dv = p.v;
    return planned(p);
  };
  const Shape wide{.type = bf16, .dim = 128}, narrow{.type = f16, .dim = 64};
  const auto bias = [](Type type) {
    return [type](Attention& a) { a.bias = Tensor(nullptr, type, {1, 8, 1024, 1024}); };
  };
  const auto mask = [](Attention& a) { a.mask = Tensor(nullptr, boolean, {1024, 1024}); };
  const Shape widest{.type = bf16, .dim = 256}, uneven{.type = f16, .dim = 192, .dim_v = 128};
  for (const Shape& shape : {widest, uneven, wide, narrow}) {
    CHECK(backward(shape, [](Attention& a) { a.softcap = 30; }).name() == "cuda:wgmma");
    CHECK(backward(shape, [](Attention& a) { a.dropout.p = 0.1; }).name() == "cuda:wgmma");
    CHECK(backward(shape, [](Attention& a) { a.scale = -1; }).name() == "cuda:wgmma");
    CHECK(backward(shape, mask).name() == "cuda:wgmma");
    CHECK(backward(shape, bias(bf16)).name() == "cuda:wgmma");
  }
  CHECK(backward(narrow, bias(f32)).name() == "cuda:wgmma");
  CHECK(says(backward(wide, bias(f32)), "not wgmma: no tile of the wgmma kernels fits"));
  CHECK(
      says(backward(narrow, bias(f64)), "not wgmma: the wgmma backward kernel cannot read a bias"));
  const auto both = [](Attention& a) {
    a.softcap = 30;
    a.dropout.p = 0.1;
  };
  CHECK(backward(narrow, both).name() == "cuda:wgmma");
  CHECK(backward(uneven, both).name() == "cuda:wgmma");
  CHECK(backward(wide, both).name() == "cuda:wgmma");
  CHECK(says(backward(widest, both), "not wgmma: softcap and dropout together"));
  CHECK(says(backward(widest, bias(f32)), "not wgmma: no tile of the wgmma kernels fits"));
  CHECK(backward(uneven, bias(f32)).name() == "cuda:wgmma");
  Attention a = attention(narrow);
  bias(f16)(a);
  CHECK(planned(problem(a, Pass::backward)).name() == "cuda:wgmma");
  a.softcap = 30;
  CHECK(says(planned(problem(a, Pass::backward)),
             "not wgmma: the wgmma backward kernel has no gradient of the bias together with a"));
}

TEST_CASE("levels follow the chip, or the name") {
  const auto level = [](const char* chip_name, const char* name) {
    return planned(problem(attention({.type = f16})), chip_name, name)
        .launches.front()
        .config.level;
  };
  CHECK(level("sm_75", "") == 75);
  CHECK(level("sm_80", "") == 80);
  CHECK(level("sm_89", "") == 80);
  CHECK(level("sm_90", "") == 90);
  CHECK(level("sm_121", "") == 90);
  CHECK(level("sm_90", "cuda:mma80") == 80);
  CHECK(level("sm_90", "cuda:mma75") == 75);
  CHECK(level("sm_61", "") == 50);
  CHECK(level("sm_90", "cuda:simt") == 50);
}

TEST_CASE("what cannot be done is refused with a reason") {
  const Problem p = problem(attention({.type = bf16}));
  CHECK(refusal(p, "sm_70", "cuda:mma").find("none of the tensor core instructions") !=
        std::string::npos);
  CHECK(refusal(p, "sm_75", "cuda:mma").find("f16 only") != std::string::npos);
  CHECK(refusal(p, "sm_90", "cuda:mma75").find("f16 only") != std::string::npos);
  CHECK(refusal(p, "sm_80", "cuda:mma90").find("lacks the instructions") != std::string::npos);
  CHECK(refusal(problem(attention({.type = f64})), "sm_90", "cuda:mma").find("f64") !=
        std::string::npos);
  CHECK(refusal(p, "sm_86", "cuda:mma/163").find("less shared memory") != std::string::npos);
  for (const char* name : {"", "cuda:mma", "cuda:simt"}) {
    for (Shape shape : {Shape{.dim = 513}, Shape{.dim = 8, .dim_v = 513}}) {
      CHECK(refusal(problem(attention(shape)), "sm_90", name).find("above 512") !=
            std::string::npos);
    }
  }
  CHECK(refusal(problem(attention({.type = f16, .dim = 512}), Pass::backward), "sm_75", "cuda:mma")
            .find("fits the shared memory") != std::string::npos);
  // Any memory: stride 0 makes such problems possible.
  const std::int64_t many = 0x7fffffff,
                     most = many - 1023;  // keys: a tile's end is counted as well
  const auto huge = [](std::int64_t batch, std::int64_t heads, std::int64_t rows) {
    const Tensor x(nullptr, bf16, {batch, heads, rows, 64}, {0, 0, 0, 1});
    return Attention{.q = x, .k = x, .v = x};
  };
  CHECK(refusal(problem(huge(1, many, most), Pass::backward), "sm_90")
            .find("more blocks than a grid") != std::string::npos);
  CHECK(refusal(problem(huge(many, 64, 1)), "sm_90").find("below 2^31") != std::string::npos);
  CHECK(refusal(problem(huge(1, 256, most)), "sm_90").find("more blocks than a grid") !=
        std::string::npos);
  CHECK(refusal(problem(huge(1, 256, most + 1)), "sm_90").find("2^31 - 1024") != std::string::npos);
}

TEST_CASE("a tiling by name replaces what it names") {
  const Problem forward = problem(attention({.dim = 128}));
  const KernelConfig standard = planned(forward).launches.front().config;
  const CudaPlan plan = planned(forward, "sm_90", "cuda:mma@rows=64,keys=32,warps=4,min_blocks=1");
  CHECK(says(plan, "tiling: asked for by name"));
  const Tiling tiling = plan.launches.front().config.tiling;
  CHECK(tiling.rows == 64);
  CHECK(tiling.keys == 32);
  CHECK(tiling.stages == standard.tiling.stages);
  check_sound(forward, chip("sm_90"), plan);

  const Problem backward = problem(attention({.dim = 128}), Pass::backward);
  const CudaPlan other =
      planned(backward, "sm_90", "cuda@rows=32,keys=64,warps=8,slices=2,stages=1");
  check_sound(backward, chip("sm_90"), other);
  CHECK(launch_of(other, Kernel::backward)->config.tiling.slices == 2);
  const CudaPlan simt = planned(backward, "sm_90", "cuda:simt@rows=16,keys=32");
  check_sound(backward, chip("sm_90"), simt);
  CHECK(launch_of(simt, Kernel::key_gradient)->config.tiling.rows == 16);
  CHECK(launch_of(simt, Kernel::key_gradient)->config.tiling.keys == 32);

  for (const char* name : {"cuda:mma@rows=48", "cuda:mma@keys=24", "cuda:mma@stages=3",
                           "cuda:mma@warps=7", "cuda:simt@rows=48"}) {
    CAPTURE(std::string(name));
    CHECK(refusal(forward, "sm_90", name).find("cannot have the tiling") != std::string::npos);
  }
  // Backward a thread loads the state of a row, and rows of a tile have positions of one block.
  for (const char* name : {"cuda:mma@rows=128,keys=32,warps=2,slices=1,stages=1",
                           "cuda:mma@rows=96,keys=128,warps=8,slices=2,stages=1"}) {
    CAPTURE(std::string(name));
    CHECK(refusal(backward, "sm_90", name).find("cannot have the tiling") != std::string::npos);
  }
  CHECK(refusal(forward, "sm_90", "cuda:mma@rows=256,keys=256,warps=8")
            .find("needs more shared memory") != std::string::npos);
}

TEST_CASE("a class of shared memory by name gives the tiles of its chips") {
  for (std::int64_t dim : {64, 128, 256, 512}) {
    for (Pass pass : {Pass::forward, Pass::backward}) {
      const Problem p = problem(attention({.batch = 64, .dim = dim}), pass);
      for (const auto& [name, chip_name] :
           {std::pair{"cuda:mma80/99", "sm_86"}, {"cuda:mma80/163", "sm_80"}}) {
        const CudaPlan named = planned(p, "sm_90", name), own = planned(p, chip_name);
        CHECK(named.supported() == (own.family == Family::mma));
        if (!named.supported()) continue;
        check_sound(p, chip(chip_name), named);
        CHECK(kernels_of(named) == kernels_of(own));
        for (std::size_t i = 0; i < own.launches.size(); ++i) {
          CHECK(named.launches[i].config == own.launches[i].config);
        }
      }
    }
  }
}

TEST_CASE("chips by name") {
  CHECK(chip_named("sm_80")->shared_per_block == 163 * 1024);
  CHECK(chip_named("sm_80")->capability() == 80);
  CHECK(chip_named("sm_103")->major == 10);
  CHECK(chip_named("sm_103")->minor == 3);
  CHECK(chip_named("sm_99") == nullptr);
  CHECK(chip_named("") == nullptr);
  CHECK(known_chips().size() == 15);
}

TEST_CASE("a limit on multiprocessors bounds persistent grids, and is explained for the others") {
  const Problem p = problem(attention({.heads_q = 32, .heads_kv = 32}));
  for (const int limit : {1, 7, 100, 500}) {
    CudaChoice limited;
    limited.multiprocessors = limit;
    const int least = std::min(limit, chip("sm_90").multiprocessors);
    const CudaPlan plan = plan_cuda(p, chip("sm_90"), limited, Reasons::given);
    CHECK(plan.family == Family::wgmma);
    REQUIRE(plan.launches.size() == 1);
    CHECK(plan.launches[0].blocks() == least);
    CHECK(says(plan, ("at most " + std::to_string(least) + " multiprocessors: forward").c_str()));
    CHECK(!says(plan, "not limited"));
  }
  CudaChoice limited;
  limited.multiprocessors = 100;
  const Problem backward = problem(attention({.heads_q = 16, .heads_kv = 16}), Pass::backward);
  CHECK(says(plan_cuda(backward, chip("sm_90"), limited, Reasons::given),
             "not limited to 100 multiprocessors, because each tile has a block: delta, finish"));
  CHECK(launch_of(plan_cuda(backward, chip("sm_90"), limited, Reasons::given), Kernel::backward)
            ->blocks() == 100);
  Attention ordered = attention({.heads_q = 16, .heads_kv = 16});
  ordered.deterministic = true;
  CHECK(says(plan_cuda(problem(ordered, Pass::backward), chip("sm_90"), limited, Reasons::given),
             "because each tile has a block: delta, backward"));
  CHECK(says(plan_cuda(p, chip("sm_80"), limited, Reasons::given),
             "not limited to 100 multiprocessors, because each tile has a block: forward"));
  CHECK(!says(planned(backward), "multiprocessors, because"));
  const Problem wide = problem(attention({.dim = 192}), Pass::backward);
  CHECK(launch_of(planned(wide), Kernel::backward)->config.cta_pair);
  const CudaPlan alone = plan_cuda(wide, chip("sm_90"), limited, Reasons::given);
  CHECK(launch_of(alone, Kernel::backward)->blocks() == 100);
}

TEST_SUITE_END();
