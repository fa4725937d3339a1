// The command line's grammar: subcommands, options, their help and examples.
#include "command_line/arguments.hpp"

#include <CLI/CLI.hpp>

namespace regard::cli {

namespace {

void add_attention(CLI::App& app, AttentionFlags& flags) {
  app.add_flag("--causal{bottom-right}", flags.causal, "hide later keys; also --causal=top-left");
  app.add_option("--window", flags.window, "keys around the diagonal: L,R; -1 = unbounded");
  app.add_option("--scale", flags.scale, "default 1 / sqrt(head size)");
  app.add_option("--softcap", flags.softcap, "score = c tanh(score / c); 0 = off");
  app.add_option("--dropout", flags.dropout, "probability of dropping, below 1");
  app.add_option("--seed", flags.seed, "of dropout");
  app.add_option("--offset", flags.offset, "of dropout");
}

void add_shape(CLI::App& app, ShapeFlags& shape, bool with_type) {
  app.add_option("--q", shape.q, "BATCHxHEADSxLENGTHxSIZE")->type_name("SHAPE");
  app.add_option("--kv-heads", shape.kv_heads, "default: q's heads")->check(CLI::PositiveNumber);
  app.add_option("--kv-len", shape.kv_len, "default: q's length")->check(CLI::NonNegativeNumber);
  app.add_option("--dim-v", shape.dim_v, "default: q's head size")->check(CLI::PositiveNumber);
  if (with_type) app.add_option("--type", shape.type, "f64, f32 (default), f16, bf16");
}

void add_score_tensors(CLI::App& app, ShapeFlags& shape) {
  app.add_option("--bias", shape.bias, "SHAPE[:type], broadcasts to BxHqxSqxSk");
  app.add_option("--mask", shape.mask, "SHAPE, bool, broadcasts likewise");
  app.add_flag("--alibi", shape.alibi, "with ALiBi slopes");
  app.add_flag("--sink", shape.sink, "with attention sinks");
}

void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "default: every core")->check(CLI::Range(1, 4096));
}

void add_device(CLI::App& app, std::string& device, bool& forbid_compiling) {
  app.add_option("--device", device, "cpu (default) or cuda:N");
  app.add_flag("--forbid-compiling", forbid_compiling, "GPU: only kernels of the cache");
}

CLI::App* add_command(CLI::App& app, const char* name, const char* what, const char* example) {
  CLI::App* const command = app.add_subcommand(name, what);
  command->footer(std::string("Example: ") + example);
  command->get_formatter()->column_width(34);
  return command;
}

void add_explain(CLI::App& app, ExplainArguments& arguments) {
  CLI::App* const command =
      add_command(app, "explain", "Which kernel would run, and why",
                  "regard explain --q 2x32x4096x128 --kv-heads 8 --type bf16 --causal --backward");
  add_shape(*command, arguments.shape, true);
  command->get_option("--q")->required();
  add_score_tensors(*command, arguments.shape);
  add_attention(*command, arguments.attention);
  command->add_flag("--backward", arguments.backward, "the backward pass");
  command->add_option("--device", arguments.run.device, "cpu (default), cuda:N, or a chip: sm_90");
  command->add_option("--backend", arguments.run.backend, "one of `regard info`");
  add_threads(*command, arguments.run.threads);
  command->add_flag("--compile", arguments.compile, "GPU: first compile, to show registers");
  command->add_flag("--json", arguments.json, "print the fields as JSON");
}

void add_attend(CLI::App& app, AttendArguments& arguments) {
  CLI::App* const command =
      add_command(app, "attend", "Attention over tensors from files, forward and backward",
                  "regard attend layer.safetensors --causal --backward --out grads.safetensors\n"
                  "         regard attend q.npy k.npy v.npy --bias bias.npy --out results/\n"
                  "A .safetensors file holds q, k, v and optionally the tensors above, by name.");
  command->add_option("files", arguments.files, "FILE.safetensors, or q.npy k.npy v.npy")
      ->required()
      ->expected(1, 3);
  static const std::pair<const char*, const char*> kExtra[] = {
      {"bias", "added to the scores"},
      {"mask", "bool, true = visible"},
      {"sink", "(heads) logits without a value"},
      {"alibi_slopes", "(heads) or (batch, heads)"},
      {"dout", "gradient that arrives at out"},
      {"dlse", "gradient that arrives at the lse"},
      {"cu_seqlens_q", "packed: (batch + 1) begins"},
      {"cu_seqlens_k", "packed: likewise for k and v"},
      {"seqused_q", "(batch) real lengths"},
      {"seqused_k", "(batch) likewise for k and v"}};
  for (const auto& [name, what] : kExtra) {
    std::string option = std::string("--") + name;
    std::replace(option.begin(), option.end(), '_', '-');
    command->add_option(option, arguments.extra_files[name], what)->type_name("NPY");
  }
  add_attention(*command, arguments.attention);
  command->add_option("--layout", arguments.layout, "of q k v out: bhsd (default) or bshd")
      ->check(CLI::IsMember({"bhsd", "bshd"}));
  command->add_option("--type", arguments.type, "first round the tensors to this type");
  command->add_flag("--backward", arguments.backward, "gradients too; dout defaults to ones");
  command->add_option("--out", arguments.out, "FILE.safetensors, or a directory for .npy");
  command->add_flag("--compare", arguments.compare, "errors, time, memory: ours, unfused");
  command->add_flag("--explain", arguments.explain, "print the plan and why");
  command->add_option("--repeat", arguments.repeat, "time the median of N runs")
      ->check(CLI::Range(1, 1000000));
  add_device(*command, arguments.run.device, arguments.run.forbid_compiling);
  command->add_option("--backend", arguments.run.backend, "one of `regard info`");
  add_threads(*command, arguments.run.threads);
}

void add_check(CLI::App& app, CheckArguments& arguments) {
  CLI::App* const command =
      add_command(app, "check", "Random problems: the chosen backend against float64",
                  "regard check --backend cpu:avx2 --seconds 60 --seed 7\n"
                  "         regard check --device cuda:0 --backend cuda:mma --problems 200\n"
                  "A failure prints the command that repeats it; exit status 1.");
  add_device(*command, arguments.device, arguments.forbid_compiling);
  command->add_option("--backend", arguments.backend, "one of `regard info`");
  command->add_option("--problems", arguments.problems, "how many")->check(CLI::PositiveNumber);
  command->add_option("--seconds", arguments.seconds, "for how long (default 60)")
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", arguments.seed, "default 1");
  command->add_option("--problem", arguments.problem, "only this one, in detail")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--type", arguments.type, "only f64, f32, f16 or bf16");
  command->add_option("--max-len", arguments.max_len, "longest sequence (default 4000)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  command->add_flag("--verbose", arguments.verbose, "describe every problem");
  command
      ->add_option("--threads", arguments.threads,
                   "default: drawn per problem; GPU: that compile ahead (every core)")
      ->check(CLI::Range(1, 4096));
}

void add_bench(CLI::App& app, BenchArguments& arguments) {
  CLI::App* const command =
      add_command(app, "bench", "Check, then time: a table and JSON lines",
                  "regard bench --preset cpu --type f32,bf16 --json results.jsonl\n"
                  "         regard bench --q 1x16x2048x64 --causal --backend cpu:avx2,cpu:avx512\n"
                  "         regard bench --device cuda:0 --preset gpu --backend cuda:mma");
  add_device(*command, arguments.device, arguments.forbid_compiling);
  command->add_option("--preset", arguments.preset, "cpu, gpu (defaults), long, short")
      ->check(CLI::IsMember({"cpu", "gpu", "long", "short"}));
  add_shape(*command, arguments.shape, false);
  command->get_option("--q")->excludes("--preset");
  command->add_option("--type", arguments.types,
                      "one or more, by comma (default f32,bf16,f16; GPU: bf16,f16)");
  add_score_tensors(*command, arguments.shape);
  add_attention(*command, arguments.attention);
  command->add_option("--passes", arguments.passes, "forward,backward (default both)");
  command->add_option("--backend", arguments.backends, "one or more, by comma");
  add_threads(*command, arguments.threads);
  command->add_option("--seconds", arguments.seconds, "to time each case (default 0.3)")
      ->check(CLI::PositiveNumber);
  command->add_option("--json", arguments.json, "append a JSON line per case to this file");
  command->add_option("--commit", arguments.commit, "recorded in JSON; else REGARD_COMMIT");
}

void add_cache(CLI::App& app, CacheArguments& arguments) {
  CLI::App* const command = add_command(app, "cache", "The GPU kernels that are kept compiled",
                                        "regard cache list\n"
                                        "They lie in REGARD_CACHE_DIR, or in the user's cache.");
  command->require_subcommand(1);
  using Action = CacheArguments::Action;
  const auto add = [&](const char* name, Action action, const char* what) {
    command->add_subcommand(name, what)->callback([&arguments, action] {
      arguments.action = action;
    });
  };
  add("list", Action::list, "Each kernel: what for, registers, spills, size");
  add("clear", Action::clear, "Delete them all");
  add("verify", Action::verify, "Name the files that are not used, and why; exit status 1");
}

void add_prebuild(CLI::App& app, PrebuildArguments& arguments) {
  CLI::App* const command =
      add_command(app, "prebuild", "Compile the usual GPU kernels into the cache; needs no GPU",
                  "regard prebuild --devices sm_80,sm_90\n"
                  "         regard prebuild --check --devices sm_75,sm_120 --known FILE");
  command->add_option("--devices", arguments.devices,
                      "chips, by comma, or all (default: those of this machine)");
  command->add_flag("--check", arguments.check,
                    "fail where registers spill, a stack is used, products wait");
  command->add_option("--known", arguments.known, "with --check: the list of kernels that may")
      ->needs("--check");
  command->add_flag("--verbose", arguments.verbose, "a line for every kernel");
}

}  // namespace

int run_command_line(int argc, char** argv) {
  CLI::App app{"Exact scaled dot product attention, forward and backward", "regard"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("regard ") + version());
  app.footer(
      "regard COMMAND --help shows a command's options and an example.\n"
      "Exit status: 0 fine, 1 wrong result or failed check, 2 bad usage or input.");
  CLI::App* const info = app.add_subcommand("info", "What this machine offers, what is missing");
  info->footer("Example: regard info");
  ExplainArguments to_explain;
  AttendArguments to_attend;
  CheckArguments to_check;
  BenchArguments to_bench;
  add_explain(app, to_explain);
  add_attend(app, to_attend);
  add_check(app, to_check);
  add_bench(app, to_bench);
  CacheArguments to_cache;
  PrebuildArguments to_prebuild;
  add_cache(app, to_cache);
  add_prebuild(app, to_prebuild);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::cerr << "regard: " << error.what() << "\n";
    const auto chosen = app.get_subcommands();
    std::cerr << "See: regard " << (chosen.empty() ? "" : chosen[0]->get_name() + " ")
              << "--help\n";
    return 2;
  }
  if (app.got_subcommand("info")) return run_info();
  if (app.got_subcommand("explain")) return run_explain(to_explain);
  if (app.got_subcommand("attend")) return run_attend(to_attend);
  if (app.got_subcommand("check")) return run_check(to_check);
  if (app.got_subcommand("cache")) return run_cache(to_cache);
  if (app.got_subcommand("prebuild")) return run_prebuild(to_prebuild);
  return run_bench(to_bench);
}

}  // namespace regard::cli
