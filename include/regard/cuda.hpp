/// \file
/// What programs need next to attention itself to use a GPU without CUDA's headers: devices,
/// memory, time, and the kernels that the library compiles at run time.
///
/// Everything throws Error: Code::unavailable where there is no driver, device or compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "regard/regard.hpp"

#pragma GCC visibility push(default)

namespace regard {

// ----------------------------------------------------------------------------------------- devices

/// A GPU of this machine.
struct CudaDevice {
  std::string name;                  ///< as the driver calls it
  std::string chip;                  ///< "sm_90"
  int multiprocessors = 0;           ///< how many it has
  std::size_t memory = 0;            ///< bytes
  std::size_t l2 = 0;                ///< bytes of the second-level cache
  std::size_t shared_per_block = 0;  ///< bytes of shared memory that a block may have
};

/// What this machine has for GPUs.
struct CudaSetup {
  std::vector<CudaDevice> devices;  ///< empty without a driver
  std::string driver;         ///< "13.0": the newest CUDA that it serves; or why there is none
  bool has_driver = false;    ///< whether `driver` is a version
  std::string compiler;       ///< NVRTC's version and file; or why there is none
  bool has_compiler = false;  ///< whether `compiler` is a version and a file
  /// What the search for the compiler found but did not trust, and why; each a sentence.
  std::vector<std::string> skipped;
  std::string cache;  ///< the folder of compiled kernels; "" = none
  /// Why kernels are neither found nor kept there, naming the folder; "" = all is well, also where
  /// the folder does not exist yet.
  std::string cache_fault;
};
/// Opens the driver and NVRTC and says what was found.
CudaSetup cuda_setup();

// ------------------------------------------------------------------------------------------ memory

/// Memory of a device, in its primary context; what takes a stream is in that one's. to_device and
/// to_host return when they are done.
namespace cuda_memory {

/// Device memory that is aligned to 256 bytes.
void* allocate(int device, std::size_t bytes);
/// Gives back what allocate returned.
void free(int device, void* memory);
/// Sets each byte.
void fill(int device, void* memory, unsigned char byte, std::size_t bytes);
/// Copies from host memory.
void to_device(int device, void* to, const void* from, std::size_t bytes);
/// Copies to host memory.
void to_host(int device, void* to, const void* from, std::size_t bytes);
/// Rows of bytes: `rows` of them, `width` bytes each.
struct RowCopy {
  void* to = nullptr;          ///< the first row
  const void* from = nullptr;  ///< likewise
  std::size_t to_pitch = 0;    ///< bytes from one row to the next
  std::size_t from_pitch = 0;  ///< likewise
  std::size_t width = 0;       ///< bytes of a row
  std::size_t rows = 0;        ///< how many
};
/// Puts copies on a stream of the device, in their order, and does not wait for them. Addresses are
/// of memory that the device reaches: its own, or another GPU's that is mapped. Rows do not
/// overlap: a pitch is at least the width.
void copy_rows(int device, const RowCopy* copies, std::size_t count, void* stream);
/// The same by a kernel for each, which is compiled at its first use, where all addresses, pitches
/// and widths are multiples of 16 bytes; else by the driver. It is for copies within one GPU's
/// memory, which the driver makes by kernels as well, but slower ones for large copies on an H100.
void copy_rows_by_kernels(int device, const RowCopy* copies, std::size_t count, void* stream);
/// to = first + second, in f32, or in f64 if all are f64: tensors of rank 4 and equal sizes, with
/// memory that the device reaches; first and second f32, `to` of any float type. One kernel on a
/// stream of the device, which is compiled at its first use.
void add_rows(int device, const Tensor& first, const Tensor& second, const Tensor& to,
              void* stream);
/// Writes a word on a stream of the device, after all that is on it; multiprocessors have no part
/// in it. The word is in memory that the device reaches, as for copy_rows.
void write_word(int device, void* word, std::uint32_t value, void* stream);
/// What follows on the stream waits until the device's word has this value or a later one: values
/// are taken to count up, and may wrap.
void wait_for_word(int device, const void* word, std::uint32_t value, void* stream);
/// Waits until the device has nothing left to do.
void synchronize(int device);
/// Gives back the memory that the library keeps for the workspaces of later calls (at most a
/// sixteenth of the device's, once the device was synchronised), in the current context if it
/// belongs to the device, else in its primary one.
void trim(int device);

}  // namespace cuda_memory

/// Seconds of GPU time that the work takes that `enqueue` puts on the default stream.
double cuda_seconds(int device, const std::function<void()>& enqueue);

// ----------------------------------------------------------------------------------------- kernels

/// Compiles the kernels of a call, or finds them, so that the call itself will not wait. The device
/// may be chip("sm_80"); on the CPU there is nothing to do. With a pass alone, data pointers may be
/// null, and the call is taken to give every output and gradient in the inputs' own types.
void prepare(const Attention&, Pass, const Run&);
/// The same for these outputs.
void prepare(const Attention&, const ForwardOutputs&, const Run&);
/// The same for these gradients.
void prepare(const Attention&, const BackwardInputs&, const Gradients&, const Run&);

/// Whether compiling that keeps a call waiting for over two seconds shows a line on stderr, where
/// that is a terminal. Default: true.
void show_compiling(bool);

/// Switched off, a call whose kernels are not cached is an Error that names the missing kernel.
void allow_compilation(bool);

/// A kernel of the cache, or one that was compiled for it.
struct CompiledKernel {
  std::string config;    ///< as the compiler reads it
  std::string chip;      ///< "sm_90"
  std::string compiler;  ///< NVRTC's version
  std::string file;      ///< its path in the cache
  /// Why the cache does not use the file, or why there is none; "" = all is well.
  std::string fault;
  /// After compiling: why the cache did not keep the kernel; "" = it did.
  std::string not_kept;
  std::size_t bytes = 0;    ///< of its machine code
  int registers = 0;        ///< of a thread
  int spill_bytes = 0;      ///< of a thread: stores and loads
  int stack_bytes = 0;      ///< of a thread
  int shared_bytes = 0;     ///< of a block
  bool serialized = false;  ///< products that should overlap wait for each other
  double seconds = 0;       ///< of a processor, that the compiler took
  bool was_cached = false;  ///< found, not compiled
};

/// Every kernel in the cache's folder.
std::vector<CompiledKernel> cached_kernels();
/// Makes the cache's folder, where there is none, for the user alone; where Regard has chosen the
/// folder and others may write to it, takes that right from them. Returns why no kernels can be
/// kept there, naming the folder; "" = they can.
std::string make_kernel_cache();
/// Empties the cache's folder and returns how many files were removed.
int clear_cached_kernels();

/// The kinds of GPUs that plans can be made for, the oldest first: "sm_50", "sm_52", ...
std::vector<std::string> chips();

/// Compiles, into the cache, the kernels of usual problems (head sizes, types, masks) for a chip.
/// `done` is told of each, also of one that fails, from several threads, one at a time. Afterwards
/// the first failure is thrown.
void prebuild(const std::string& chip,
              const std::function<void(const CompiledKernel&, int number, int count)>& done);

/// A call to compile for. Of the tensors' addresses only the alignment to 256 bytes counts; memory
/// is neither read nor written.
struct PlannedCall {
  Pass pass = Pass::forward;      ///< which call it is
  Attention attention{};          ///< as for the call
  ForwardOutputs outputs{};       ///< of a forward call
  BackwardInputs inputs{};        ///< of a backward call
  Gradients gradients{};          ///< of a backward call
  std::string backend{};          ///< as Run::backend
  bool gradients_follow = false;  ///< of a forward call: as Run::gradients_follow
  std::string origin{};           ///< where it is written ("calls.jsonl:3"), for errors; or ""
};
/// The same for the kernels of these calls, for example of those that a run with REGARD_RECORD
/// wrote down.
void prebuild(const std::string& chip, const std::vector<PlannedCall>& calls,
              const std::function<void(const CompiledKernel&, int number, int count)>& done);

}  // namespace regard

#pragma GCC visibility pop
