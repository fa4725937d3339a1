// JsonLine over nlohmann::ordered_json, kept to this file because the header is slow to compile.
#include "output/json_line.hpp"

#include <nlohmann/json.hpp>

namespace regard::cli {

struct JsonLine::Data {
  nlohmann::ordered_json value = nlohmann::ordered_json::object();
};

JsonLine::JsonLine() : data_(std::make_unique<Data>()) {}
JsonLine::~JsonLine() = default;
JsonLine::JsonLine(JsonLine&&) noexcept = default;

void JsonLine::text(const char* name, const std::string& value) { data_->value[name] = value; }
void JsonLine::number(const char* name, double value) { data_->value[name] = value; }
void JsonLine::integer(const char* name, std::int64_t value) { data_->value[name] = value; }
void JsonLine::count(const char* name, std::uint64_t value) { data_->value[name] = value; }
void JsonLine::boolean(const char* name, bool value) { data_->value[name] = value; }
void JsonLine::object(const char* name, const JsonLine& value) {
  data_->value[name] = value.data_->value;
}
void JsonLine::list(const char* name, const std::vector<std::int64_t>& values) {
  data_->value[name] = values;
}

void JsonLine::list(const char* name, const std::vector<std::string>& values) {
  data_->value[name] = values;
}
void JsonLine::list(const char* name, const std::vector<JsonLine>& values) {
  auto& list = data_->value[name] = nlohmann::ordered_json::array();
  for (const JsonLine& value : values) list.push_back(value.data_->value);
}

std::string JsonLine::str() const {
  return data_->value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace regard::cli
