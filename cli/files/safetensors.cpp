// Reads the header by events, so that no document is built and repeated names are seen.
#include "files/safetensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "command_line/parse.hpp"
#include "files/content.hpp"
#include "files/input_file.hpp"
#include "files/output_file.hpp"

namespace regard::cli {

namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit

std::string shown(const std::string& text) { return printable(text, 60); }

struct Entry {
  std::string name, dtype;
  std::vector<std::uint64_t> shape, offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
class HeaderEvents {
 public:
  using Json = nlohmann::json;

  explicit HeaderEvents(const InputFile& file) : file_(file) {}
  std::vector<Entry> entries;

  bool null() { wrong("null"); }
  bool boolean(bool) { wrong("true or false"); }
  bool number_integer(Json::number_integer_t) { wrong("a negative number"); }
  bool number_unsigned(Json::number_unsigned_t value) {
    if (!list_) wrong("a number");
    list_->push_back(value);
    if (list_->size() > 64) refuse("has too many numbers");
    return true;
  }
  bool number_float(Json::number_float_t, const std::string&) { wrong("a fraction"); }
  bool string(std::string& value) {
    if (depth_ == 2 && metadata_) return true;
    if (depth_ != 2 || field_ != "dtype" || list_) wrong("a string");
    entries.back().dtype = value;
    return true;
  }
  bool binary(Json::binary_t&) { wrong("binary data"); }
  bool start_object(std::size_t) {
    if (list_ || ++depth_ > 2 || (depth_ == 2 && metadata_)) {
      if (depth_ > 2 || list_) wrong("an object");
    }
    return true;
  }
  bool key(std::string& name) {
    if (depth_ == 1) {
      top_name_ = name;
      if (!names_.insert(name).second) {
        file_.refuse("header", fmt::format("the name \"{}\" stands there twice", shown(name)));
      }
      metadata_ = name == "__metadata__";
      if (!metadata_) entries.push_back({.name = name, .dtype = {}, .shape = {}, .offsets = {}});
      field_.clear();
      return true;
    }
    if (metadata_) return true;
    Entry& entry = entries.back();
    field_ = name;
    bool* const seen = name == "dtype"          ? &entry.has_dtype
                       : name == "shape"        ? &entry.has_shape
                       : name == "data_offsets" ? &entry.has_offsets
                                                : nullptr;
    if (!seen) refuse(fmt::format("unknown field \"{}\"", shown(name)));
    if (*seen) refuse(fmt::format("the field \"{}\" stands there twice", name));
    *seen = true;
    return true;
  }
  bool end_object() {
    --depth_;
    return true;
  }
  bool start_array(std::size_t) {
    if (depth_ != 2 || metadata_ || list_ || (field_ != "shape" && field_ != "data_offsets")) {
      wrong("a list");
    }
    list_ = field_ == "shape" ? &entries.back().shape : &entries.back().offsets;
    return true;
  }
  bool end_array() {
    list_ = nullptr;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
    file_.refuse("header", fmt::format("is not valid JSON at byte {}", position));
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    file_.refuse(entries.empty() ? "header" : shown(entries.back().name), reason);
  }
  [[noreturn]] void wrong(const char* what) const {
    if (depth_ == 0 || field_.empty()) {
      file_.refuse(top_name_.empty() ? "header" : shown(top_name_),
                   fmt::format("{} where none belongs", what));
    }
    refuse(fmt::format("{}: {} where none belongs", shown(field_), what));
  }

  const InputFile& file_;
  int depth_ = 0;
  bool metadata_ = false;
  std::string top_name_, field_;
  std::vector<std::uint64_t>* list_ = nullptr;
  std::set<std::string> names_;
};

struct Format {
  const char* dtype;
  Type type;  // none: bytes are counted, but the type cannot be used
  std::uint64_t width;
};
static_assert(kTypeCount == 7, "a type was added: its name in the format");
constexpr Format kFormats[] = {
    {"F64", Type::f64, 8},   {"F32", Type::f32, 4},      {"F16", Type::f16, 2},
    {"BF16", Type::bf16, 2}, {"BOOL", Type::boolean, 1}, {"I32", Type::i32, 4},
    {"I64", Type::none, 8},  {"U64", Type::none, 8},     {"U32", Type::none, 4},
    {"I16", Type::none, 2},  {"U16", Type::none, 2},     {"I8", Type::none, 1},
    {"U8", Type::none, 1},
};

const Format* format_of(const std::string& dtype) {
  for (const Format& format : kFormats) {
    if (dtype == format.dtype) return &format;
  }
  return nullptr;
}

// Field by field, then all ranges: in order, without holes, up to the end of the file.
void check_entries(const InputFile& file, std::vector<Entry>& entries, std::uint64_t data_bytes) {
  for (const Entry& e : entries) {
    const std::string name = shown(e.name);
    if (!e.has_dtype || !e.has_shape || !e.has_offsets) {
      file.refuse(name, "must have dtype, shape and data_offsets");
    }
    if (e.offsets.size() != 2 || e.offsets[0] > e.offsets[1]) {
      file.refuse(name + ": data_offsets", "must be [begin, end] with begin <= end");
    }
    if (e.offsets[1] > data_bytes) {
      file.refuse(name + ": data_offsets",
                  fmt::format("end at {}, past the data's {} bytes", e.offsets[1], data_bytes));
    }
    const Format* const format = format_of(e.dtype);
    if (!format) continue;
    unsigned __int128 bytes = format->width;
    for (std::uint64_t size : e.shape) {
      bytes *= size;
      if (bytes > data_bytes && size > 0) bytes = static_cast<unsigned __int128>(data_bytes) + 1;
    }
    if (bytes != e.offsets[1] - e.offsets[0]) {
      file.refuse(name + ": shape", fmt::format("does not fill its {} bytes of {}",
                                                e.offsets[1] - e.offsets[0], e.dtype));
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  std::uint64_t end = 0;
  for (const Entry& e : entries) {
    if (e.offsets[0] != end) {
      file.refuse(shown(e.name) + ": data_offsets",
                  e.offsets[0] < end ? "overlap another tensor's" : "leave a hole before them");
    }
    end = e.offsets[1];
  }
  if (end != data_bytes) {
    file.refuse("data",
                fmt::format("the tensors end at byte {}, the file holds {}", end, data_bytes));
  }
}

Array read_entry(const InputFile& file, const Entry& e, std::uint64_t data_begin) {
  const std::string name = shown(e.name);
  const Format* const format = format_of(e.dtype);
  if (e.shape.size() > Tensor::kMaxRank)
    file.refuse(name + ": shape", "has more than 4 dimensions");
  const std::string fault = content_fault(e.name, {.type = format ? format->type : Type::none,
                                                   .int64 = e.dtype == "I64",
                                                   .name = shown(e.dtype)});
  if (!fault.empty()) file.refuse(name + ": dtype", fault);
  Sizes sizes;
  for (std::uint64_t size : e.shape) {
    if (size > INT64_MAX) file.refuse(name + ": shape", "has a size beyond 63 bits");
    sizes.push_back(static_cast<Index>(size));
  }
  const std::uint64_t begin = data_begin + e.offsets[0];
  if (e.dtype == "I64") return read_int64(file, begin, sizes, name);
  Array array(format->type, sizes);
  file.read(begin, array.data(), array.byte_count(), name.c_str());
  return array;
}

}  // namespace

std::map<std::string, Array> read_safetensors(const std::string& path,
                                              const std::vector<std::string>& wanted,
                                              std::vector<std::string>& ignored) {
  const InputFile file(path);
  if (file.size() < 8) file.refuse("header length", "the file is too short to be .safetensors");
  unsigned char start[8];
  file.read(0, start, 8, "header length");
  std::uint64_t length = 0;
  for (int n = 7; n >= 0; --n) length = length << 8 | start[n];
  if (length > kMaxHeader || length > file.size() - 8) {
    file.refuse("header length",
                fmt::format("{} bytes; the file holds {} after it", length, file.size() - 8));
  }
  std::string text(length, '\0');
  file.read(8, text.data(), text.size(), "header");
  if (!text.starts_with('{')) file.refuse("header", "must begin with {");
  HeaderEvents events(file);
  nlohmann::json::sax_parse(text, &events);
  check_entries(file, events.entries, file.size() - 8 - length);
  std::map<std::string, Array> arrays;
  for (const Entry& entry : events.entries) {
    if (std::find(wanted.begin(), wanted.end(), entry.name) == wanted.end()) {
      ignored.push_back(shown(entry.name));
    } else {
      arrays.emplace(entry.name, read_entry(file, entry, 8 + length));
    }
  }
  return arrays;
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::vector<Array> dense;
  std::uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    dense.push_back(converted(tensor, tensor.type));
    const auto* const format = std::find_if(std::begin(kFormats), std::end(kFormats),
                                            [&](const Format& f) { return f.type == tensor.type; });
    header[name] = {{"dtype", format->dtype},
                    {"shape", dense.back().sizes},
                    {"data_offsets", {at, at + dense.back().byte_count()}}};
    at += dense.back().byte_count();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  OutputFile file(path);
  unsigned char start[8];
  for (int n = 0; n < 8; ++n) start[n] = static_cast<unsigned char>(text.size() >> (8 * n));
  file.write(start, 8);
  file.write(text.data(), text.size());
  for (const Array& array : dense) file.write(array.data(), array.byte_count());
  file.commit();
}

}  // namespace regard::cli
