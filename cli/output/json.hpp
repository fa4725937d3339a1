// JSON values, each kept as its text on one line.
#pragma once

#include <concepts>
#include <string>
#include <utility>
#include <vector>

namespace regard::cli {

class Json;
using Fields = std::vector<std::pair<const char*, Json>>;  // in this order

class Json {
 public:
  Json(const Fields& fields);  // an object
  Json(const std::string& text);
  Json(const char* text) : Json(std::string(text)) {}
  Json(double number);  // NaN and infinities become null
  template <std::integral Number>
  Json(Number number) : text_(std::to_string(number)) {
    if constexpr (std::same_as<Number, bool>) text_ = number ? "true" : "false";
  }
  template <class Value>
  Json(const std::vector<Value>& values) : text_("[") {
    for (const Value& value : values) text_ += (text_ == "[" ? "" : ",") + Json(value).text();
    text_ += "]";
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace regard::cli
