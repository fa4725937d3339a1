/// \file
/// Exact scaled dot product attention, forward and backward. cuda.hpp has the devices and the
/// memory of GPUs, mask.hpp masks that many calls share, and distributed.hpp sequences over several
/// processes.
///
/// One value, Attention, says what is computed; forward, backward, workspace and explain all take
/// it. What each field means, to the last edge, stands in docs/semantics.md.
///
/// Memory. No element of an output may share memory with an element of another output or of an
/// input, tables of sequences included; a call in which one does is refused. Elements may lie
/// between one another: dq, dk and dv may be slices of one buffer. Inputs may overlap. The
/// workspace and the memory of a Mask must not share memory with any tensor, which is not checked.
/// Tables of sequences are read once on the CPU; on a GPU they must not change before the call's
/// work is done.
///
/// Threads. Every function may be called from any number of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "regard/error.hpp"
#include "regard/mask.hpp"
#include "regard/tensor.hpp"

#pragma GCC visibility push(default)

namespace regard {

// -------------------------------------------------------------------------------- what to compute

/// Where the diagonal of a causal mask ends: query i sees keys j <= i (top_left) or
/// j <= i + Sk - Sq (bottom_right). Equal when Sq = Sk.
enum class Causal : std::uint8_t { none, top_left, bottom_right };

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // bf16 is a Type as well
/// How tensor cores may round f32 inputs; the CPU computes `full` whatever is asked.
enum class Precision : std::uint8_t { full, tf32, bf16 };
#pragma GCC diagnostic pop

/// Keys from diag - left to diag + right stay visible; -1 means unbounded. diag is i for
/// Causal::top_left, else i + Sk - Sq.
struct Window {
  std::int64_t left = -1;   ///< -1 = unbounded
  std::int64_t right = -1;  ///< -1 = unbounded
};

/// Each element of the softmax is kept with probability 1 - p by a pure function of
/// (seed, offset, b, h, i, j), and scaled by 1 / (1 - p). p is realised in steps of 1/65536.
struct Dropout {
  double p = 0;              ///< 0 <= p < 1
  std::uint64_t seed = 0;    ///< any number
  std::uint64_t offset = 0;  ///< any number; another one gives another mask
  /// Not null: the seed is these two words, the low one first, in memory of the call's device. A
  /// GPU reads them when the call's kernels run, so that a replayed graph draws a new mask where
  /// they have changed; until then they must stay. On a GPU, offset is then below 2^32.
  const std::uint32_t* seed_words = nullptr;
};

/// B batches, Hq query heads, Hkv key/value heads, Sq queries, Sk keys, head sizes D and Dv.
/// Packed sequences: q is (total_q, Hq, D), k and v (total_k, Hkv, D or Dv); cu_seqlens_* and
/// max_seqlen_* are given, and Sq, Sk below stand for the max_seqlen.
struct Attention {
  Tensor q{};  ///< (B, Hq, Sq, D)   f64, f32, f16, bf16; last stride 1
  Tensor k{};  ///< (B, Hkv, Sk, D)  q's type
  Tensor v{};  ///< (B, Hkv, Sk, Dv) q's type

  Tensor bias{};  ///< broadcasts to (B, Hq, Sq, Sk); f64, f32, f16, bf16; added to the scores
  Tensor mask{};  ///< broadcasts to (B, Hq, Sq, Sk); bool; true = the pair is visible
  /// Broadcasts to (B, Hq, Sq, 2 n), n from 1 to 8; i32; last stride 1. Row i sees the keys of its
  /// n spans, each a begin and an end: begin <= j < end. Packed: (Hq or 1, total_q, 2 n); indices
  /// count within the sequence. Any numbers are safe.
  Tensor row_spans{};
  /// Broadcasts to (B, Hq, Sk, 2 n): key j is seen by the rows of its n spans. Packed: (Hq or 1,
  /// total_k, 2 n).
  Tensor key_spans{};
  /// Instead of mask, row_spans and key_spans: what make_mask made of them.
  Mask visible{};
  Tensor alibi_slopes{};  ///< (Hq) or (B, Hq); f32; score -= slope * |i + Sk - Sq - j|
  Tensor sink{};          ///< (Hq); f32; a logit that joins the denominator and carries no value

  Tensor cu_seqlens_q{};          ///< (B + 1); i32; where each packed sequence begins
  Tensor cu_seqlens_k{};          ///< as cu_seqlens_q
  Tensor seqused_q{};             ///< (B); i32; how many rows of each sequence are real
  Tensor seqused_k{};             ///< as seqused_q
  std::int64_t max_seqlen_q = 0;  ///< packed only: of the longest sequence on, up to q's rows
  std::int64_t max_seqlen_k = 0;  ///< as max_seqlen_q

  /// The call has rows and keys of a longer sequence: row i stands at q_positions[i / 128] + i %
  /// 128 there, key j at k_position + j. (ceil(Sq / 128)) or (B, ceil(Sq / 128)); i32; last stride
  /// 1; not negative, and each at least 128 above the one before. Causal masks (top_left only),
  /// windows, ALiBi and dropout go by positions; bias, mask, spans and lengths by the call's own
  /// indices. Not for packed sequences. Where neither q_positions nor k_position is given, a
  /// call is no part: windows and ALiBi are then aligned by the ends of the sequences. So every
  /// part of a sequence gives q_positions, also the one whose k_position is 0.
  Tensor q_positions{};
  std::int64_t k_position = 0;   ///< of key 0; with dropout a multiple of 32
  std::int64_t batch_begin = 0;  ///< added to b where dropout counts it
  std::int64_t head_begin = 0;   ///< added to h where dropout counts it

  std::optional<double> scale{};  ///< default 1 / sqrt(D)
  double softcap = 0;             ///< > 0: score = softcap * tanh(score / softcap), before the bias
  Causal causal = Causal::none;   ///< default: every key is visible
  Window window{};                ///< default: unbounded
  Dropout dropout{};              ///< default: none
  Precision precision = Precision::full;  ///< of f32 on tensor cores
  bool deterministic = false;  ///< GPU gradients bitwise repeatable; the CPU's always are
  /// Forward: out (f32; f64 for f64 inputs) and lse hold a result over other keys, which the call
  /// replaces by the result over both sets. An lse of -inf is an empty set; then out may hold
  /// anything. The backward pass is the same with and without it.
  bool continue_from = false;
};

/// Which of the two calls is meant.
enum class Pass : std::uint8_t { forward, backward };

/// What forward writes; with Attention::continue_from, what it reads first.
struct ForwardOutputs {
  /// (B, Hq, Sq, Dv); q's type or f32. Packed: (total_q, Hq, Dv).
  Tensor out{};
  /// (B, Hq, Sq); f32 (f64 for f64 inputs); natural log; optional without continue_from. Packed:
  /// (Hq, total_q).
  Tensor lse{};
};

/// What backward reads next to the inputs.
struct BackwardInputs {
  Tensor out{};   ///< as forward wrote it
  Tensor lse{};   ///< as forward wrote it
  Tensor dout{};  ///< as out; q's type or f32
  Tensor dlse{};  ///< as lse; the gradient that arrives at the lse; optional
  /// As lse: dout . out - dlse of each row. Instead of out and dlse, for a caller whose calls over
  /// different keys share one result.
  Tensor delta{};
};

/// What backward writes. Each is optional; what is not given is not computed.
struct Gradients {
  Tensor dq{};     ///< as q; q's type or f32
  Tensor dk{};     ///< as k; q's type or f32
  Tensor dv{};     ///< as v; q's type or f32
  Tensor dbias{};  ///< exactly bias's sizes (broadcast dimensions summed); bias's type or f32
  Tensor dsink{};  ///< (Hq); f32
  bool accumulate = false;  ///< add to what the tensors hold instead of overwriting it
};

// ----------------------------------------------------------------------------------- where and how

/// Where the tensors lie and the work is done.
struct Device {
  /// The CPU, a GPU of this machine, or a chip that need not be here.
  enum class Kind : std::uint8_t { cpu, cuda, chip };
  Kind kind = Kind::cpu;  ///< default: the CPU
  int index = 0;          ///< cuda: which GPU
  std::string name{};     ///< chip: "sm_80"; nothing is computed on it
};

/// The CPU.
inline Device cpu() { return {}; }
/// A GPU of this machine.
inline Device cuda(int index) { return {.kind = Device::Kind::cuda, .index = index, .name = {}}; }
/// A kind of GPU by its name, "sm_80": for plans, explanations and compiling (prepare); calls that
/// compute refuse it.
inline Device chip(std::string name) {
  return {.kind = Device::Kind::chip, .index = 0, .name = std::move(name)};
}

/// Memory for intermediate results. Empty: the library allocates and frees its own (on a GPU in the
/// order of the stream).
struct Workspace {
  void* data = nullptr;  ///< on a GPU: device memory, aligned to 256 bytes
  std::size_t size = 0;  ///< bytes; at least workspace(...)
};

/// A caller's allocator, for the workspace of a call whose Run::workspace is empty, so that the
/// call need not be planned twice.
struct Allocator {
  /// Returns memory like Workspace::data of at least `size` bytes, or null, which is an Error
  /// (Code::out_of_memory); so is an exception, whose text the Error has. It is called at most once
  /// in a call, by the calling thread, before anything is written. The memory must stay until the
  /// call has returned; on a GPU until the stream gets there, as memory does that an allocator in
  /// the order of the stream gets back after the call.
  void* (*allocate)(void* self, std::size_t size) = nullptr;
  void* self = nullptr;  ///< passed through to allocate
};

/// A caller's thread pool. run must call task(context, index) once for each index in [0, tasks), in
/// any order and on any threads, and return when all have returned. Anything else, and an
/// exception, is an Error that names `executor`; the results are then incomplete. A call may use it
/// several times, or not at all. While it runs, the calling thread is not cancelled
/// (pthread_cancel).
struct Executor {
  /// Calls task(context, index) for each index.
  void (*run)(void* self, int tasks, void (*task)(void* context, int index),
              void* context) = nullptr;
  void* self = nullptr;  ///< passed through to run
};

/// Where and how to run.
struct Run {
  Device device{};         ///< default: the CPU
  void* stream = nullptr;  ///< GPU: the CUstream to run on; null = the default stream
  Workspace workspace{};   ///< default: from `allocator`
  Allocator allocator{};   ///< empty = the library's own
  int threads = 0;         ///< CPU: up to 4096; 0 = every core that the caller may use
  Executor executor{};     ///< CPU: empty = the library's own pool
  /// "" = choose; or the name of one of backends(): "reference", "cpu:avx2", "cuda:mma".
  std::string backend{};
  /// GPU: a backward call with every gradient will follow this forward call. If a kernel has to be
  /// compiled, those of both calls are compiled side by side. Changes no result.
  bool gradients_follow = false;
  /// GPU: how many multiprocessors kernels may occupy, so that others run at the same time; 0 =
  /// all. explain says which kernels the limit does not hold for. Changes no result beyond
  /// rounding.
  int multiprocessors = 0;
};

// ------------------------------------------------------------------------------------ what happens

/// Computes out and, where given, lse.
///
/// On the CPU, blocks until the results are written. Throws Error; then nothing was written, unless
/// memory ran out while a few rows were redone (Code::out_of_memory; give a workspace to make that
/// unlikely) or an Executor broke its contract. The calling thread's rounding mode, flush-to-zero
/// setting and unmasked floating-point exceptions change no result, and stay as they are.
///
/// On a GPU, all tensors lie in memory that the device reaches. The work is put on the stream, in
/// the current context where that belongs to the device, and the call returns; it never
/// synchronises, and may be captured into a graph. The first call of a kind compiles its kernels,
/// about a second; from two seconds on a line on stderr says so, if that is a terminal.
void forward(const Attention&, const ForwardOutputs&, const Run& = {});
/// Computes the gradients that are given, as forward does.
void backward(const Attention&, const BackwardInputs&, const Gradients&, const Run& = {});

/// Bytes that Run::workspace must have. With a pass alone, data pointers may be null, and the call
/// is taken to give every output and gradient in the inputs' own types.
std::size_t workspace(const Attention&, Pass, const Run& = {});
/// The same for these outputs.
std::size_t workspace(const Attention&, const ForwardOutputs&, const Run& = {});
/// The same for these gradients.
std::size_t workspace(const Attention&, const BackwardInputs&, const Gradients&, const Run& = {});

/// Which kernel runs, on what tiling and why; data pointers of the tensors may be null here.
struct Explanation {
  bool supported = false;     ///< whether forward or backward would run
  std::string backend;        ///< "cpu:avx512"
  std::string kernel;         ///< the configuration in one line
  std::string text;           ///< everything, for a person; ends with a newline
  std::size_t workspace = 0;  ///< bytes
  /// (query, key) pairs that the intervals leave visible, over B and Hq; all of them where
  /// positions lie in a GPU's memory.
  double pairs = 0;
  double flops = 0;  ///< 2 (D + Dv) per pair forward, 2 (3 D + 2 Dv) backward
};
/// Says which kernel a call would run, and why.
Explanation explain(const Attention&, Pass, const Run& = {});
/// Writes Explanation::text.
std::ostream& operator<<(std::ostream&, const Explanation&);

/// Writes the mask that dropout applies: keep (B, Hq, Sq, Sk); bool; true = kept. Needs no data in
/// q, k and v; packed sequences use their own row and column numbers.
void dropout_mask(const Attention&, const Tensor& keep);

/// The probability that dropout realises for p: the nearest multiple of 1/65536 below 1.
double dropout_probability(double p);

// ------------------------------------------------------------------------------------ shared masks

/// Bytes of device memory that make_mask takes for such calls: the tile maps of both passes. For a
/// dense mask they are an eighth of its bytes a pass, with tiles of few columns up to all of them.
/// 0 on the CPU, and where no kernel reads a map. Data pointers may be null.
std::size_t mask_memory(const Attention&, const Run& = {});

/// A value of mask, row_spans and key_spans, of which one at least is given, for the calls of many
/// layers: Attention::visible. It serves calls on the same device, with the same B, Hq, Sq, Sk and
/// packing; others get an Error that names `visible`. Results are those of the tensors.
///
/// On a GPU, a small kernel of each call looks at the mask first, and makes a map of its tiles.
/// make_mask puts these kernels on the stream, once for both passes, as forward does, and may be
/// captured into a graph; calls then launch none. A call whose tiles are others, because of another
/// type, head size or backend, or whose intervals or sequence tables are others, may have to make
/// its own map, as without a value; explain says which. On another stream, a call must be ordered
/// behind make_mask.
///
/// `memory`: on a GPU, device memory of mask_memory(a, run) bytes, aligned to 256. It, the memory
/// of mask and spans, and on a GPU that of sequence tables, are kept by reference: they must stay,
/// and must not change, until the work of the last call with the value is done. Data pointers of
/// other tensors may be null.
Mask make_mask(const Attention& a, const Workspace& memory = {}, const Run& = {});

// ------------------------------------------------------------------------------- what is available

/// An implementation that this library has.
struct BackendInfo {
  std::string name;        ///< what Run::backend and REGARD_BACKEND take
  bool available = false;  ///< usable on this machine
  std::string note;        ///< what it is; or why it is missing and how to get it
};
/// Every implementation, best first within a device.
std::vector<BackendInfo> backends();

/// This machine's CPU.
struct Machine {
  std::string cpu;  ///< the processor's own name
  /// The instruction sets that the kernels ask about and that are usable.
  std::vector<std::string> isa;
  int threads = 0;     ///< cores that the calling thread may use
  std::size_t l1 = 0;  ///< bytes of one core's first data cache; 0 = unknown
  std::size_t l2 = 0;  ///< bytes of one core's second cache; 0 = unknown
  std::size_t l3 = 0;  ///< bytes of the third cache; 0 = unknown
};
/// Describes this machine's CPU.
Machine machine();

/// FLOP/s that the instruction behind the chosen kernel reaches in a register-only loop on
/// Run::threads threads, measured now (about 50 ms).
double measured_peak(Type type, const Run& = {});

/// The version of the library: "0.2.0".
const char* version();

}  // namespace regard

#pragma GCC visibility pop
