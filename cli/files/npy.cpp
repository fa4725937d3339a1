// A strict reader of the header's Python dictionary, and a writer of version 1 files.
#include "files/npy.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "command_line/parse.hpp"
#include "files/content.hpp"
#include "files/input_file.hpp"
#include "files/output_file.hpp"

namespace regard::cli {

namespace {

constexpr std::uint64_t kMaxHeader = 1 << 16;  // NumPy's own limit is 10,000

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<Sizes> shape;
};

// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class HeaderReader {
 public:
  HeaderReader(const InputFile& file, std::string_view text) : file_(file), text_(text) {}

  Header read() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !header.descr) {
        skip_space();
        if (at_ < text_.size() && text_[at_] == '[') {
          file_.refuse("descr", "structured types are not supported");
        }
        header.descr = quoted();
      } else if (key == "fortran_order" && !header.fortran_order) {
        header.fortran_order = boolean_word();
      } else if (key == "shape" && !header.shape) {
        header.shape = tuple();
      } else {
        file_.refuse("header", fmt::format("unknown or repeated key '{}'", printable(key, 40)));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) file_.refuse("header", "text follows the dictionary");
    return header;
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) {
      ++at_;
    }
  }
  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) file_.refuse("header", fmt::format("'{}' expected at byte {}", c, at_));
  }
  std::string quoted() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : 0;
    if (quote != '\'' && quote != '"') {
      file_.refuse("header", fmt::format("a quoted word expected at byte {}", at_));
    }
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) file_.refuse("header", "a quoted word does not end");
    const std::string word(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return word;
  }
  bool boolean_word() {
    skip_space();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    file_.refuse("fortran_order", "must be True or False");
  }
  Sizes tuple() {
    Sizes sizes;
    expect('(');
    while (!accept(')')) {
      skip_space();
      Index value = 0;
      const char* const begin = text_.data() + at_;
      const auto [end, code] = std::from_chars(begin, text_.data() + text_.size(), value);
      if (code != std::errc{} || value < 0) {
        file_.refuse("shape", fmt::format("a whole number, 0 or more, expected at byte {}", at_));
      }
      at_ += static_cast<std::size_t>(end - begin);
      sizes.push_back(value);
      if (sizes.size() > Tensor::kMaxRank) file_.refuse("shape", "has more than 4 dimensions");
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }

  const InputFile& file_;
  std::string_view text_;
  std::size_t at_ = 0;
};

struct Format {
  const char* descr;
  Type type;  // none: only read to be refused, or int64
  std::size_t width;
  const char* name;
};
static_assert(kTypeCount == 7, "a type was added: its name in the format");
constexpr Format kFormats[] = {
    {"<f8", Type::f64, 8, "float64"}, {"<f4", Type::f32, 4, "float32"},
    {"<f2", Type::f16, 2, "float16"}, {"|b1", Type::boolean, 1, "bool"},
    {"<i4", Type::i32, 4, "int32"},   {"<i8", Type::none, 8, "int64"},
    {"<u8", Type::none, 8, "uint64"}, {"<u4", Type::none, 4, "uint32"},
    {"<i2", Type::none, 2, "int16"},  {"<u2", Type::none, 2, "uint16"},
    {"|i1", Type::none, 1, "int8"},   {"|u1", Type::none, 1, "uint8"},
};

bool is_int64(const Format& format) { return std::string_view(format.descr) == "<i8"; }

const Format& format_of(const InputFile& file, const std::string& descr,
                        const std::string& tensor) {
  for (const Format& format : kFormats) {
    if (descr != format.descr) continue;
    const std::string fault = content_fault(
        tensor, {.type = format.type, .int64 = is_int64(format), .name = format.name});
    if (!fault.empty()) file.refuse("descr", fault);
    return format;
  }
  const std::string shown = printable(descr, 40);
  if (descr.starts_with('>')) {
    file.refuse("descr", fmt::format("'{}' is big endian; save array.astype('<{}')", shown,
                                     shown.substr(1)));
  }
  file.refuse("descr", fmt::format("'{}' is not supported; f8, f4, f2, b1, i4 and i8 are (bfloat16 "
                                   "is read from .safetensors)",
                                   shown));
}

}  // namespace

Array read_npy(const std::string& path, const std::string& tensor) {
  const InputFile file(path);
  unsigned char start[12] = {};
  if (file.size() < 10) file.refuse("header", "the file is too short to be .npy");
  file.read(0, start, 10, "header");
  if (std::memcmp(start, "\x93NUMPY", 6) != 0) file.refuse("magic", "this is not a .npy file");
  const int version = start[6];
  if (version < 1 || version > 3 || start[7] != 0) {
    file.refuse("version",
                fmt::format("{}.{} is not supported; 1.0 to 3.0 are", version, start[7]));
  }
  std::uint64_t length = start[8] | std::uint64_t{start[9]} << 8;
  std::uint64_t begin = 10;
  if (version > 1) {
    file.read(10, start + 10, 2, "header length");
    length |= std::uint64_t{start[10]} << 16 | std::uint64_t{start[11]} << 24;
    begin = 12;
  }
  if (length > kMaxHeader || length > file.size() - begin) {
    file.refuse("header length",
                fmt::format("{} bytes; the file holds {} after it", length, file.size() - begin));
  }
  std::string text(length, '\0');
  file.read(begin, text.data(), text.size(), "header");
  const Header header = HeaderReader(file, text).read();
  if (!header.descr) file.refuse("descr", "is missing");
  if (!header.fortran_order) file.refuse("fortran_order", "is missing");
  if (!header.shape) file.refuse("shape", "is missing");
  const Format& format = format_of(file, *header.descr, tensor);
  if (*header.fortran_order) {
    file.refuse("fortran_order", "is True; save numpy.ascontiguousarray(array)");
  }
  const Index count = count_of(*header.shape, path + ": shape");
  const std::uint64_t held = file.size() - begin - length;
  const auto needed = static_cast<unsigned __int128>(count) * format.width;
  if (needed != held) {
    file.refuse("shape", fmt::format("needs {} elements of {} bytes; the file holds {} bytes",
                                     count, format.width, held));
  }
  if (format.type != Type::none) {
    Array array(format.type, *header.shape);
    file.read(begin + length, array.data(), held, "data");
    return array;
  }
  return read_int64(file, begin + length, *header.shape, "data");
}

void write_npy(const std::string& path, const Tensor& tensor) {
  const auto* format = std::find_if(std::begin(kFormats), std::end(kFormats),
                                    [&](const Format& f) { return f.type == tensor.type; });
  if (format == std::end(kFormats)) {
    throw UsageError(
        fmt::format("{}: .npy has no type for {}; write a .safetensors file: --out "
                    "NAME.safetensors",
                    path, name_of(tensor.type)));
  }
  std::string shape;
  for (int axis = 0; axis < tensor.rank; ++axis) shape += std::to_string(tensor.sizes[axis]) + ", ";
  if (tensor.rank > 1) shape.resize(shape.size() - 2);
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                   format->descr, shape);
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10, ' ');
  header.back() = '\n';
  const Array dense = converted(tensor, tensor.type);
  OutputFile file(path);
  const unsigned char start[] = {0x93,
                                 'N',
                                 'U',
                                 'M',
                                 'P',
                                 'Y',
                                 1,
                                 0,
                                 static_cast<unsigned char>(header.size() & 0xff),
                                 static_cast<unsigned char>(header.size() >> 8)};
  file.write(start, sizeof start);
  file.write(header.data(), header.size());
  file.write(dense.data(), dense.byte_count());
  file.commit();
}

}  // namespace regard::cli
