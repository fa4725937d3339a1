// The part of XLA's foreign function interface that the handlers need: its binary interface 0.1,
// declared here so that the wheel is built without jaxlib (a tenth of a gigabyte) and one wheel
// serves every version of it. XLA promises to keep old minor versions working; structs grow only
// at their ends, and each begins with its own size. tests/package/test_jax_abi.py compares these
// declarations with the installed jaxlib's header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace regard::python::xla {

inline constexpr int kMajor = 0;
inline constexpr int kMinor = 1;

struct Failure;  // made by the runtime; null is success
struct Context;  // of one call

enum Stage : int { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

enum FailureCode : int {
  kUnknown = 2,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

enum ElementType : int {
  kPred = 1,
  kS32 = 4,
  kS64 = 5,
  kU32 = 8,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
};

enum ExtensionType : int { kMetadata = 1 };
enum OperandKind : int { kBuffer = 1 };
enum AttributeKind : int { kScalar = 3, kString = 4 };

struct Extension {
  std::size_t size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  std::size_t size;
  Extension* extension;
  int major;
  int minor;
};

struct Metadata {
  std::size_t size;
  Version version;  // for the handler to set
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// Dense, in row-major order where the call asked for that.
struct Buffer {
  std::size_t size;
  Extension* extension;
  ElementType type;
  void* data;
  std::int64_t rank;
  std::int64_t* sizes;
};

struct Text {
  const char* data;
  std::size_t size;
};

struct Scalar {
  ElementType type;
  void* value;
};

struct Operands {
  std::size_t size;
  Extension* extension;
  std::int64_t count;
  OperandKind* kinds;
  void** values;
};

struct Attributes {
  std::size_t size;
  Extension* extension;
  std::int64_t count;
  AttributeKind* kinds;
  Text** names;
  void** values;
};

// Arguments of the runtime's functions.
struct MakeFailure {
  std::size_t size;
  Extension* extension;
  const char* message;
  FailureCode code;
};

struct DestroyFailure {
  std::size_t size;
  Extension* extension;
  Failure* failure;
};

struct GetStream {
  std::size_t size;
  Extension* extension;
  Context* context;
  void* stream;  // out
};

struct AllocateMemory {
  std::size_t size;
  Extension* extension;
  Context* context;
  std::size_t bytes;
  std::size_t alignment;
  void* data;  // out
};

struct FreeMemory {
  std::size_t size;
  Extension* extension;
  Context* context;
  std::size_t bytes;
  void* data;
};

struct GetDevice {
  std::size_t size;
  Extension* extension;
  Context* context;
  std::int32_t ordinal;  // out
};

struct Schedule {
  std::size_t size;
  Extension* extension;
  Context* context;
  void (*task)(void* data);
  void* data;
};

struct CountThreads {
  std::size_t size;
  Extension* extension;
  Context* context;
  std::int64_t* threads;  // out
};

using AnyFunction = void (*)();

struct Api {
  std::size_t size;
  Extension* extension;
  Version version;
  const void* internal;
  Failure* (*make_failure)(MakeFailure*);
  AnyFunction get_message;
  void (*destroy_failure)(DestroyFailure*);
  AnyFunction register_handler;
  Failure* (*get_stream)(GetStream*);
  AnyFunction state_functions[4];
  Failure* (*allocate_memory)(AllocateMemory*);
  Failure* (*free_memory)(FreeMemory*);
  Failure* (*schedule)(Schedule*);
  Failure* (*count_threads)(CountThreads*);
  AnyFunction future_functions[3];
  AnyFunction get_run;
  Failure* (*get_device)(GetDevice*);  // since jaxlib 0.6
};

struct CallFrame {
  std::size_t size;
  Extension* extension;
  const Api* api;
  Context* context;
  Stage stage;
  Operands operands;
  Operands results;
  Attributes attributes;
};

using Handler = Failure*(CallFrame*);

}  // namespace regard::python::xla
