// DLPack's C exchange API: https://dmlc.github.io/dlpack/latest/c_api.html, version 1.3. Only what
// is used here. A framework's array type has the attribute __dlpack_c_exchange_api__, a capsule of
// an ExchangeApi that lives as long as the process.
#pragma once

#include <cstdint>

namespace regard::python::dlpack {

inline constexpr const char* kCapsule = "dlpack_exchange_api";
inline constexpr std::uint32_t kMajorVersion = 1;

struct DeviceAndIndex {
  std::int32_t type = 0;  // as nanobind::device names them
  std::int32_t index = 0;
};

struct ElementType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 0;
};

struct View {
  void* data = nullptr;
  DeviceAndIndex device{};
  std::int32_t rank = 0;
  ElementType type{};
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;  // elements
  std::uint64_t byte_offset = 0;
};

struct ExchangeApi {
  struct {
    std::uint32_t major = 0;
    std::uint32_t minor = 0;
  } version;
  ExchangeApi* previous = nullptr;
  void* allocate = nullptr;
  void* managed_from_object = nullptr;
  void* managed_to_object = nullptr;
  // A view that is valid as long as the object. Waits for no stream. 0, or -1 with Python's error.
  int (*view_of_object)(void* object, View* view) = nullptr;
  // The stream on which the framework queues its work now. 0, or -1 with Python's error.
  int (*current_stream)(std::int32_t device_type, std::int32_t index, void** stream) = nullptr;
};

}  // namespace regard::python::dlpack
