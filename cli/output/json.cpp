// Numbers and texts as nlohmann_json writes them; its header is slow to compile.
#include "output/json.hpp"

#include <nlohmann/json.hpp>

namespace regard::cli {

namespace {

std::string dumped(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Json::Json(double number) : text_(dumped(number)) {}
Json::Json(const std::string& text) : text_(dumped(text)) {}
Json::Json(const Fields& fields) : text_("{") {
  for (const auto& [name, value] : fields) {
    text_ += (text_ == "{" ? "" : ",") + dumped(name) + ":" + value.text();
  }
  text_ += "}";
}

}  // namespace regard::cli
