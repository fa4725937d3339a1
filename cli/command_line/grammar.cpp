// Subcommands and options with their help and examples.
#include "command_line/grammar.hpp"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>

namespace regard::cli {

namespace {

// Checks without a description in --help, where the option's type name says enough.
CLI::Validator silent(CLI::Validator check) { return check.description(""); }
CLI::Validator one_of(std::vector<std::string> choices) {
  return silent(CLI::IsMember(std::move(choices)));
}

// Refuses NaN as well, because a time of NaN seconds never ends.
const CLI::Validator kSeconds(
    [](const std::string& text) {
      double value = 0;
      const bool fine = CLI::detail::lexical_cast(text, value) && value > 0 && value <= 1e9;
      return std::string(fine ? "" : text + " is not above 0 and at most 1e9");
    },
    "");
// A whole text that is an integer, of 64 bits and not below `least`. Options of an unsigned type
// would take -1, and numbers of more bits, for the largest one.
template <class Integer>
CLI::Validator integer_from(Integer least, const char* rule) {
  return CLI::Validator(
      [least, rule](const std::string& text) {
        Integer value = 0;
        const char* const end = text.data() + text.size();
        const auto parsed = std::from_chars(text.data(), end, value);
        const bool fine = parsed.ec == std::errc() && parsed.ptr == end && value >= least;
        return fine ? "" : text + " is not " + rule;
      },
      "");
}
const CLI::Validator kPositive = integer_from<std::int64_t>(1, "an integer above 0");
const CLI::Validator kNotNegative = integer_from<std::int64_t>(0, "an integer from 0 on");
const CLI::Validator kWord64 = integer_from<std::uint64_t>(0, "an integer from 0 to 2^64 - 1");

template <class Number>
CLI::Validator between(Number least, Number most) {
  return silent(CLI::Range(least, most));
}

constexpr const char* kType = "f64|f32|f16|bf16";

void add_attention(CLI::App& app, AttentionFlags& flags) {
  app.add_flag("--causal{bottom-right}", flags.causal, "hide later keys; also --causal=top-left")
      ->type_name("bottom-right|top-left")
      ->option_text(" ");
  app.add_option("--window", flags.window, "keys around the diagonal; -1 = unbounded")
      ->type_name("L,R");
  app.add_option("--scale", flags.numbers.scale, "default 1 / sqrt(head size)")->type_name("X");
  app.add_option("--softcap", flags.numbers.softcap, "score = c tanh(score / c); 0 = off")
      ->type_name("C");
  app.add_option("--k-position", flags.numbers.k_position, "of key 0 in a longer sequence")
      ->type_name("N");
  Dropout& dropout = flags.numbers.dropout;
  app.add_option("--dropout", dropout.p, "probability of dropping, below 1")->type_name("P");
  app.add_option("--seed", dropout.seed, "of dropout")->check(kWord64)->type_name("N");
  app.add_option("--offset", dropout.offset, "of dropout")->check(kWord64)->type_name("N");
}

void add_shape(CLI::App& app, ShapeFlags& shape) {
  app.add_option("--q", shape.q, "BATCHxHEADSxLENGTHxSIZE")->type_name("SHAPE")->required();
  app.add_option("--kv-heads", shape.kv_heads, "default: q's heads")
      ->check(kPositive)
      ->type_name("N");
  app.add_option("--kv-len", shape.kv_len, "default: q's length")
      ->check(kNotNegative)
      ->type_name("N");
  app.add_option("--dim-v", shape.dim_v, "default: q's head size")
      ->check(kPositive)
      ->type_name("N");
  app.add_option("--type", shape.type, "default f32")->type_name(kType);
  app.add_option("--bias", shape.bias, "broadcasts to BxHqxSqxSk")->type_name("SHAPE[:type]");
  app.add_option("--mask", shape.mask, "bool, broadcasts likewise")->type_name("SHAPE");
  app.add_option("--row-spans", shape.row_spans, "broadcasts to BxHqxSqx2n")->type_name("SHAPE");
  app.add_option("--key-spans", shape.key_spans, "broadcasts to BxHqxSkx2n")->type_name("SHAPE");
  app.add_option("--q-positions", shape.q_positions, "(ceil(Sq / 128)) or (B, ceil(Sq / 128))")
      ->type_name("SHAPE");
  app.add_flag("--alibi", shape.alibi, "with ALiBi slopes");
  app.add_flag("--sink", shape.sink, "with attention sinks");
}

void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "default: every core")
      ->check(between(1, 4096))
      ->type_name("N");
}

void add_backend(CLI::App& app, std::string& backend) {
  app.add_option("--backend", backend, "one of `regard info`")->type_name("BACKEND");
}

void add_device(CLI::App& app, std::string& device, bool& forbid_compiling) {
  app.add_option("--device", device, "cpu (default) or cuda:N")->type_name("DEVICE");
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
  add_shape(*command, arguments.shape);
  add_attention(*command, arguments.attention);
  command->add_flag("--backward", arguments.backward, "the backward pass");
  command->add_option("--device", arguments.run.device, "cpu (default), cuda:N, or a chip: sm_90")
      ->type_name("DEVICE");
  add_backend(*command, arguments.run.backend);
  add_threads(*command, arguments.run.threads);
  command->add_flag("--compile", arguments.compile, "GPU: first compile, to show registers");
  command->add_flag("--json", arguments.json, "print the fields as JSON");
}

void add_attend(CLI::App& app, AttendArguments& arguments) {
  CLI::App* const command =
      add_command(app, "attend", "Attention over tensors from files, forward and backward",
                  "regard attend layer.safetensors --causal --backward --out grads.safetensors\n"
                  "         regard attend q.npy k.npy v.npy --bias bias.npy --out results/");
  command
      ->add_option("files", arguments.files,
                   "q.npy k.npy v.npy, or FILE.safetensors with tensors by name")
      ->type_name("FILE")
      ->required()
      ->expected(1, 3);
  static const std::pair<const char*, const char*> kExtra[] = {
      {"bias", "added to the scores"},
      {"mask", "bool, true = visible"},
      {"row_spans", "begins and ends of the keys that rows see"},
      {"key_spans", "begins and ends of the rows that see keys"},
      {"sink", "(heads) logits without a value"},
      {"alibi_slopes", "(heads) or (batch, heads)"},
      {"dout", "gradient that arrives at out"},
      {"dlse", "gradient that arrives at the lse"},
      {"cu_seqlens_q", "packed: (batch + 1) begins"},
      {"cu_seqlens_k", "packed: likewise for k and v"},
      {"seqused_q", "(batch) real lengths"},
      {"seqused_k", "(batch) likewise for k and v"},
      {"q_positions", "of the first of each 128 rows in a longer sequence"}};
  for (const auto& [name, what] : kExtra) {
    std::string option = std::string("--") + name;
    std::replace(option.begin(), option.end(), '_', '-');
    command->add_option(option, arguments.extra_files[name], what)->type_name("NPY");
  }
  add_attention(*command, arguments.attention);
  command->add_option("--layout", arguments.layout, "of q k v out; default bhsd")
      ->check(one_of({"bhsd", "bshd"}))
      ->type_name("bhsd|bshd");
  command->add_option("--type", arguments.type, "first round the tensors to this type")
      ->type_name(kType);
  command->add_flag("--backward", arguments.backward, "gradients too; dout defaults to ones");
  command->add_option("--out", arguments.out, ".safetensors, or a directory for .npy")
      ->type_name("FILE");
  command->add_flag("--compare", arguments.compare, "errors, time, memory: ours, unfused");
  command->add_flag("--explain", arguments.explain, "print the plan and why");
  command->add_option("--repeat", arguments.repeat, "time the median of N runs")
      ->check(between(1, 1000000))
      ->type_name("N");
  add_device(*command, arguments.run.device, arguments.run.forbid_compiling);
  add_backend(*command, arguments.run.backend);
  add_threads(*command, arguments.run.threads);
  command->add_flag("--json", arguments.json, "print the tables as JSON");
}

void add_check(CLI::App& app, CheckArguments& arguments) {
  CLI::App* const command =
      add_command(app, "check", "Random problems: the chosen backend against float64",
                  "regard check --backend cpu:avx2 --seconds 60 --seed 7\n"
                  "         regard check --device cuda:0 --backend cuda:mma --problems 200\n"
                  "A failure prints the command that repeats it; exit status 1.");
  add_device(*command, arguments.device, arguments.forbid_compiling);
  add_backend(*command, arguments.backend);
  command->add_option("--problems", arguments.problems, "how many")
      ->check(kPositive)
      ->type_name("N");
  command->add_option("--seconds", arguments.seconds, "for how long (default 60)")
      ->check(kSeconds)
      ->type_name("S");
  command->add_option("--seed", arguments.seed, "default 1")->check(kWord64)->type_name("N");
  command->add_option("--problem", arguments.problem, "only this one, in detail")
      ->check(between(std::int64_t{0}, INT64_MAX - 1))
      ->type_name("N");
  command->add_option("--type", arguments.type, "only this type")->type_name(kType);
  command->add_option("--max-len", arguments.max_len, "longest sequence (default 4000)")
      ->check(between(std::int64_t{1}, std::int64_t{1} << 24))
      ->type_name("N");
  command->add_flag("--verbose", arguments.verbose, "describe every problem");
  command->add_flag("--json", arguments.json, "print the failures and the table as JSON");
  command
      ->add_option("--threads", arguments.threads,
                   "default: drawn per problem; GPU: that compile ahead (every core)")
      ->check(between(1, 4096))
      ->type_name("N");
}

void add_cache(CLI::App& app, CacheArguments& arguments) {
  CLI::App* const command = add_command(app, "cache", "The GPU kernels that are kept compiled",
                                        "regard cache list\n"
                                        "They lie in REGARD_CACHE_DIR, or in the user's cache.");
  command->require_subcommand(1);
  using Action = CacheArguments::Action;
  const auto add = [&](const char* name, Action action, const char* what) {
    return command->add_subcommand(name, what)->callback([&arguments, action] {
      arguments.action = action;
    });
  };
  add("list", Action::list, "Each kernel: what for, registers, spills, size")
      ->add_flag("--json", arguments.json, "print the kernels as JSON");
  add("clear", Action::clear, "Delete them all");
  add("verify", Action::verify, "Name the files that are not used, and why; exit status 1");
}

void add_prebuild(CLI::App& app, PrebuildArguments& arguments) {
  CLI::App* const command =
      add_command(app, "prebuild", "Compile GPU kernels into the cache, ahead; needs no GPU",
                  "regard prebuild --devices sm_80,sm_90\n"
                  "         regard prebuild --recorded problems.jsonl\n"
                  "         regard prebuild --check --devices sm_75,sm_120 --known FILE");
  command
      ->add_option("--devices", arguments.devices,
                   "chips, by comma, or all (default: those of this machine)")
      ->type_name("CHIPS");
  command
      ->add_option("--recorded", arguments.recorded, "the calls that a run wrote to $REGARD_RECORD")
      ->type_name("FILE");
  command->add_flag("--check", arguments.check,
                    "fail where registers spill, a stack is used, products wait");
  command->add_option("--known", arguments.known, "with --check: the list of kernels that may")
      ->type_name("FILE")
      ->needs("--check");
  command->add_flag("--verbose", arguments.verbose, "a line for every kernel");
}

void add_info(CLI::App& app, InfoArguments& arguments) {
  CLI::App* const command =
      add_command(app, "info", "What this machine offers, what is missing", "regard info");
  command->add_flag("--json", arguments.json, "print the fields as JSON");
}

void add_completion(CLI::App& app, CompletionArguments& arguments) {
  CLI::App* const command =
      add_command(app, "completion", "Print a script that completes commands in a shell",
                  "regard completion bash > ~/.local/share/bash-completion/completions/regard\n"
                  "         regard completion zsh > FOLDER_OF_FPATH/_regard\n"
                  "         regard completion fish > ~/.config/fish/completions/regard.fish");
  command->add_option("shell", arguments.shell, "which")
      ->required()
      ->check(one_of({"bash", "zsh", "fish"}))
      ->type_name("bash|zsh|fish");
}

// Adds what holds for every option and command; to be called last.
void finish(CLI::App& app, bool& quiet) {
  const CLI::Validator not_empty(
      [](const std::string& value) {
        return std::string(value.empty() ? "must not be empty" : "");
      },
      "");
  for (CLI::Option* const option : app.get_options()) option->check(not_empty);
  app.add_flag("--quiet", quiet, "no notes and no progress on stderr");
  for (CLI::App* const command : app.get_subcommands([](const CLI::App*) { return true; })) {
    finish(*command, quiet);
  }
}

}  // namespace

void define(CLI::App& app, Arguments& arguments) {
  app.description("Exact scaled dot product attention, forward and backward");
  app.name("regard");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("regard ") + version());
  app.footer(
      "regard COMMAND --help shows a command's options and an example.\n"
      "Exit status: 0 fine, 1 wrong result or failed check, 2 bad usage or input.");
  add_info(app, arguments.info);
  add_explain(app, arguments.explain);
  add_attend(app, arguments.attend);
  add_check(app, arguments.check);
  add_cache(app, arguments.cache);
  add_prebuild(app, arguments.prebuild);
  add_completion(app, arguments.completion);
  app.add_subcommand("manual", "Print the manual page")->group("");  // hidden
  finish(app, arguments.quiet);
}

}  // namespace regard::cli
