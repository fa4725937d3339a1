/// \file
/// Context parallelism: one sequence, or packed documents, spread over several processes or GPUs.
///
/// A Plan says which rows of the sequence each rank has. Collectives say how ranks reach each
/// other: NCCL, or functions of the caller's own (MPI, UCX, shared memory). forward and backward
/// then take a rank's rows of q, k and v, and write the same rows of out and of the gradients.
/// docs/distributed.md explains schemes and costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "regard/regard.hpp"

#pragma GCC visibility push(default)

namespace regard::distributed {

// ------------------------------------------------------------------------------------------- plans

/// Self-attention over a whole sequence of S rows, which are its keys too.
struct WholeSequence {
  std::int64_t length = 0;       ///< S; from 1 to 2^31 - 1
  std::int64_t batch = 1;        ///< B; only numbers of bytes depend on it
  std::int64_t heads_q = 1;      ///< Hq, a multiple of heads_kv
  std::int64_t heads_kv = 0;     ///< Hkv; 0 = heads_q
  std::int64_t head_size = 1;    ///< D
  std::int64_t head_size_v = 0;  ///< Dv; 0 = head_size
  Type type = Type::bf16;        ///< of q, k and v
  Causal causal = Causal::none;  ///< both alignments mean the same
  Window window{};               ///< default: unbounded
  /// Where each packed document begins and where the last one ends: ascends from 0, up to S. A row
  /// sees keys of its document; rows after the last one see nothing. Empty: one document.
  std::vector<std::int32_t> cu_seqlens{};
};

/// gather: each rank receives the keys that its rows see. halo: the same with contiguous rows, so
/// that near keys have few owners. ulysses: each rank receives all rows of some query heads, and
/// the keys that they read. ring: keys pass from rank to rank, so that a rank never has more than
/// those of two. automatic: of the first three, the one that should take the least time.
enum class Scheme : std::uint8_t { automatic, gather, halo, ulysses, ring };

/// Which blocks of 128 rows a rank has: neighbours; a chunk from the front and one from the back;
/// the largest block that is left to the rank with the least visible pairs so far; each packed
/// document to few ranks, likewise; or neighbours with as many visible pairs as the other ranks'.
enum class Dealing : std::uint8_t { contiguous, zigzag, greedy, documents, contiguous_by_area };

/// How many rows of Scheme::halo the ranks have: equally many, to a block; or what has even numbers
/// of visible pairs. The other schemes have even numbers of pairs with equal rows.
enum class RowCounts : std::uint8_t { equal, by_area };

/// What is computed while keys arrive and sums travel, by Scheme::gather and Scheme::halo of
/// several heads of keys. none: nothing; one call over all heads. heads: some heads after the
/// others, in two calls forward and up to three backward (one where heads share a gradient of the
/// bias), with the same bits on the CPU. On a GPU, exchange is then called with a stream of the
/// library's own, which the call's stream waits for. It gains where exchange needs no
/// multiprocessors; NCCL's kernels mostly wait for those of attention (docs/distributed.md).
enum class Overlap : std::uint8_t { none, heads };

/// What Scheme::automatic reckons with; only the ratio matters.
struct Rates {
  double bytes_per_second = 3e11;  ///< that a rank receives while all communicate
  double flops = 5e14;             ///< FLOP/s of a rank
};

/// The rows [begin, end) of the whole sequence.
struct Rows {
  std::int64_t begin = 0;                        ///< the first one
  std::int64_t end = 0;                          ///< after the last one
  bool operator==(const Rows&) const = default;  ///< equal bounds
};

/// Bytes that a rank receives in a pass.
struct Moved {
  std::int64_t forward = 0;   ///< inputs, and with ulysses out
  std::int64_t backward = 0;  ///< inputs again, and gradients
};

struct PlanContents;  // the library's own

/// How the rows of a sequence are spread over ranks: a pure value, equal on all ranks for equal
/// arguments, which needs no device. Rows are dealt in blocks of 128 rows of the sequence; the last
/// block may be shorter. A rank's rows are its blocks in ascending order, and may be none. A copy
/// costs a counter. Functions that take a rank throw Error where there is no such rank.
class Plan {
 public:
  const WholeSequence& whole() const;  ///< what was asked, with heads_kv and head_size_v
  int ranks() const;                   ///< how many there are
  Scheme scheme() const;               ///< not automatic
  Dealing dealing() const;             ///< how blocks were dealt
  Overlap overlap() const;             ///< none where scheme or heads leave no choice

  /// The numbers of the rank's blocks, ascending.
  const std::vector<std::int64_t>& blocks(int rank) const;
  /// How many rows the rank has.
  std::int64_t rows(int rank) const;
  /// (rows): the row of the sequence that each row of the rank is, ascending.
  std::vector<std::int64_t> positions(int rank) const;
  /// (ceil(rows / 128)): positions of the first row of each block, as Attention::q_positions.
  const std::vector<std::int32_t>& first_positions(int rank) const;

  /// The range that holds every key that a row of the rank sees, in whole blocks.
  Rows keys(int rank) const;
  /// The keys of `owner` that `reader` needs, in as few runs of neighbouring rows as there are.
  /// With ulysses they are keys of the reader's heads only, and none if it has no heads.
  std::vector<Rows> runs(int owner, int reader) const;

  /// How many pairs are visible to the rank's rows, in one batch entry and head; with ulysses to
  /// its heads, the mean over heads.
  double area(int rank) const;
  /// The largest area over their mean: 1 where the work is spread evenly.
  double balance() const;
  /// What the rank receives, the sink's gradient aside. With ulysses, bias, mask and their gradient
  /// come on top, the lse that forward writes, dlse, and what is f32 where the inputs are narrower.
  Moved moved(int rank) const;
  /// Rows, visible pairs and bytes of each rank, and why; ends with a newline.
  std::string explain() const;

 private:
  friend struct PlanContents;
  Plan() = default;
  std::shared_ptr<const PlanContents> contents_;
};

/// Plans for 1 to 4096 ranks. Throws Error, which names the member that is wrong.
Plan plan(const WholeSequence&, int ranks, Scheme = Scheme::automatic, const Rates& = {},
          RowCounts = RowCounts::equal, Overlap = Overlap::none);

// ------------------------------------------------------------------------------------- collectives

/// Bytes for another rank.
struct Send {
  int rank = 0;                ///< to whom
  const void* data = nullptr;  ///< from where
  std::size_t bytes = 0;       ///< 1 at least
};

/// Bytes from another rank.
struct Receive {
  int rank = 0;           ///< from whom
  void* data = nullptr;   ///< to where
  std::size_t bytes = 0;  ///< 1 at least, and as many as are sent
};

/// How this rank reaches the others. The same table may serve any number of calls, one at a time.
struct Collectives {
  int rank = 0;          ///< this one, below size
  int size = 1;          ///< as many as the plan has
  void* self = nullptr;  ///< passed through to exchange
  /// A group of sends and receives that begin together, so that no order of theirs can block
  /// (MPI_Isend, MPI_Irecv, MPI_Waitall). Messages from one rank to another arrive in their order.
  /// On the CPU, returns when all have been sent and received. On a GPU, puts them on the stream:
  /// the call's, or with Overlap::heads one of the library's own. Returns null; or why it failed,
  /// which becomes an Error. What it throws passes through, except std::bad_alloc, which becomes an
  /// Error too. Where the rank refuses its own arguments, it throws that Error either way.
  const char* (*exchange)(void* self, const Send* sends, std::size_t send_count,
                          const Receive* receives, std::size_t receive_count,
                          void* stream) = nullptr;
  Device::Kind memory = Device::Kind::cpu;  ///< what exchange moves: Device::Kind::cpu or cuda
};

/// Exchanges by NCCL, for GPUs. libnccl.so.2 is opened at the first call; Code::unavailable where
/// there is none. `communicator` is the caller's ncclComm_t, and lives as long as the table.
Collectives nccl_collectives(void* communicator);

// ------------------------------------------------------------------------------------------- calls

/// Computes a rank's rows of out and lse. A collective: every rank calls it, with equal options,
/// also a rank without rows.
///
/// The tensors of Attention are the rank's: q (B, Hq, rows, D), k (B, Hkv, rows, D) and
/// v (B, Hkv, rows, Dv), with rows = plan.rows(rank); bias and mask broadcast to
/// (B, Hq, rows, S), this rank's rows over all keys of the sequence. alibi_slopes and sink are
/// equal on all ranks. ALiBi and dropout go by places in the whole sequence. The plan says which
/// pairs are visible, so that causal, window, sequence tables, spans, `visible` and positions are
/// refused here; a bool mask (B, 1, 1, S) hides padding. With ulysses every rank gives the same
/// optional tensors, of the same types, which broadcast in the same dimensions but rows.
///
/// On the CPU, ranks first tell each other in a short message whether they accept their arguments,
/// and whether plan and options are equal: if one rank throws, all do. Run::workspace as
/// `workspace` says; the library's own by default.
void forward(const Attention&, const ForwardOutputs&, const Plan&, const Collectives&,
             const Run& = {});

/// Computes a rank's rows of the gradients that are given, the same ones on all ranks, as forward
/// does. dk and dv are summed over ranks in f32 or wider, in an order that does not change; so is
/// dsink, which every rank gets whole. dbias has bias's sizes: gradients of this rank's rows, over
/// all keys. With Overlap::heads it has heads of its own on all ranks, or on none.
void backward(const Attention&, const BackwardInputs&, const Gradients&, const Plan&,
              const Collectives&, const Run& = {});

/// Bytes that Run::workspace must have for such a call.
std::size_t workspace(const Attention&, const ForwardOutputs&, const Plan&, int rank,
                      const Run& = {});
/// The same for these gradients.
std::size_t workspace(const Attention&, const BackwardInputs&, const Gradients&, const Plan&,
                      int rank, const Run& = {});

}  // namespace regard::distributed

#pragma GCC visibility pop
