// The arguments of each command as plain values, so that two files alone know the parser.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "regard/regard.hpp"

namespace regard::cli {

struct AttentionFlags {
  std::string causal, window;
  Attention numbers;  // scale, dropout and the like: what the parser reads as numbers
};

struct ShapeFlags {
  std::string q, type, bias, mask, row_spans, key_spans, q_positions;
  std::int64_t kv_heads = 0, kv_len = -1, dim_v = 0;  // 0, -1 = as q
  bool alibi = false, sink = false;
};

struct RunFlags {
  std::string device = "cpu", backend;
  int threads = 0;
  bool forbid_compiling = false;
};

struct InfoArguments {
  bool json = false;
};

struct ExplainArguments {
  ShapeFlags shape;
  AttentionFlags attention;
  RunFlags run;
  bool backward = false, json = false, compile = false;
};

struct AttendArguments {
  std::vector<std::string> files;
  std::map<std::string, std::string> extra_files;  // "bias" -> "bias.npy"
  AttentionFlags attention;
  RunFlags run;
  std::string layout = "bhsd", type, out;
  bool backward = false, compare = false, explain = false, json = false;
  int repeat = 1;
};

struct CheckArguments {
  std::string device = "cpu", backend, type;
  double seconds = 0;
  std::int64_t problems = 0, problem = -1, max_len = 4000;
  std::uint64_t seed = 1;
  int threads = 0;
  bool verbose = false, forbid_compiling = false, json = false;
};

struct CacheArguments {
  enum class Action { list, clear, verify } action = Action::list;
  bool json = false;
};

struct PrebuildArguments {
  std::string devices, known, recorded;
  bool check = false, verbose = false;
};

struct CompletionArguments {
  std::string shell;  // bash, zsh or fish
};

struct Arguments {
  bool quiet = false;
  InfoArguments info;
  ExplainArguments explain;
  AttendArguments attend;
  CheckArguments check;
  CacheArguments cache;
  PrebuildArguments prebuild;
  CompletionArguments completion;
};

// Each returns the exit status; bad usage and failures are thrown.
int run_info(const InfoArguments& arguments);
int run_explain(const ExplainArguments& arguments);
int run_attend(const AttendArguments& arguments);
int run_check(const CheckArguments& arguments);
int run_cache(const CacheArguments& arguments);
int run_prebuild(const PrebuildArguments& arguments);

// Parses the command line and runs the command it names.
int run_command_line(int argc, char** argv);

// The Attention that the flags describe, tensors without data.
Attention described_attention(const ShapeFlags& shape, const AttentionFlags& flags);
Attention without_tensors(const AttentionFlags& flags);
Run described_run(const RunFlags& flags);

}  // namespace regard::cli
