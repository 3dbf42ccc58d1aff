#include "src/io/state_json.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>
#include <variant>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDepthLimit = 100;

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

Json json_of(double value) {
  if (std::isfinite(value)) {
    return value;  // nlohmann writes as many digits as give the same bits back
  }
  return Json::array({"double", fmt::format("{:016x}", std::bit_cast<uint64_t>(value))});
}

class Flattener {
 public:
  Flattener(FlatState& result, const std::string& where) : result_(result), where_(where) {}

  Json walk(const StateDict& state, const std::string& path, int depth) {
    if (depth > kDepthLimit) {
      refuse(path, "is nested too deeply");
    }
    Json json = Json::object();
    for (const StateDict::Entry& entry : state.entries()) {
      const std::string name = join(path, entry.name);
      check_text(entry.name, name);
      json[entry.name] = std::visit([&](const auto& value) { return value_of(value, name, depth); }, entry.value);
    }
    return json;
  }

 private:
  template <class T>
  Json value_of(const T& value, const std::string& name, int depth) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (!result_.tensors.emplace(name, value).second) {
        refuse(name, "is there twice, once nested and once with dots in its name");
      }
      return nullptr;
    } else if constexpr (std::is_same_v<T, StateDict>) {
      return walk(value, name, depth + 1);
    } else if constexpr (std::is_same_v<T, double>) {
      return json_of(value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      check_text(value, name);
      return value;
    } else {
      return value;
    }
  }

  void check_text(const std::string& text, const std::string& name) {
    try {
      (void)Json(text).dump();
    } catch (const Json::exception&) {
      refuse(name, "is or has a name that is not UTF-8; store bytes as a uint8 tensor");
    }
  }

  [[noreturn]] void refuse(const std::string& name, const char* what) const {
    throw ConfigError(fmt::format("{}: entry '{}' {}", where_, name, what));
  }

  FlatState& result_;
  const std::string& where_;
};

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw CorruptFile(
      fmt::format("{}: the state's structure {}; is the file damaged or of another version?", where, what));
}

// Finds the tensor of a name, or only notes it down.
using TensorOf = std::function<at::Tensor(const std::string& name)>;

class Unflattener {
 public:
  Unflattener(const TensorOf& tensor_of, const std::string& where) : tensor_of_(tensor_of), where_(where) {}

  StateDict walk(const Json& json, const std::string& path, int depth) const {
    if (depth > kDepthLimit || !json.is_object()) {
      fail(where_, fmt::format("is no dictionary at '{}', or nested too deeply", path));
    }
    StateDict state;
    for (const auto& [name, value] : json.items()) {
      state.set(name, value_of(value, join(path, name), depth));
    }
    return state;
  }

 private:
  StateDict::Value value_of(const Json& value, const std::string& name, int depth) const {
    if (value.is_null()) {
      return tensor_of_(name);
    }
    if (value.is_object()) {
      return walk(value, name, depth + 1);
    }
    if (value.is_boolean()) {
      return value.get<bool>();
    }
    if (value.is_string()) {
      return value.get<std::string>();
    }
    if (value.is_number_float()) {
      return value.get<double>();
    }
    if (value.is_number_integer() && (!value.is_number_unsigned() || std::in_range<int64_t>(value.get<uint64_t>()))) {
      return value.get<int64_t>();
    }
    return double_from_bits(value, name);
  }

  double double_from_bits(const Json& value, const std::string& name) const {
    uint64_t bits = 0;
    bool good = value.is_array() && value.size() == 2 && value[0] == "double" && value[1].is_string();
    if (good) {
      const auto text = value[1].get<std::string>();
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bits, 16);
      good = error == std::errc() && text.size() == 16 && end == text.data() + text.size();
    }
    if (!good) {
      fail(where_, fmt::format("has an unknown value at '{}'", name));
    }
    return std::bit_cast<double>(bits);
  }

  const TensorOf& tensor_of_;
  const std::string& where_;
};

StateDict walk(const std::string& structure, const TensorOf& tensor_of, const std::string& where) {
  Json json;
  try {
    json = Json::parse(structure);
  } catch (const Json::exception& error) {
    fail(where, fmt::format("is not JSON ({})", error.what()));
  }
  return Unflattener(tensor_of, where).walk(json, "", 0);
}

}  // namespace

FlatState flatten(const StateDict& state, const std::string& where) {
  FlatState result;
  result.structure = Flattener(result, where).walk(state, "", 0).dump();
  return result;
}

std::set<std::string> tensor_names(const std::string& structure, const std::string& where) {
  std::set<std::string> names;
  walk(
      structure,
      [&](const std::string& name) {
        names.insert(name);
        return at::Tensor();
      },
      where);
  return names;
}

StateDict unflatten(const std::string& structure, const std::map<std::string, at::Tensor>& tensors,
                    const std::string& where) {
  return walk(
      structure,
      [&](const std::string& name) {
        const auto found = tensors.find(name);
        if (found == tensors.end()) {
          fail(where, fmt::format("asks for the tensor '{}', which is not there", name));
        }
        return found->second;
      },
      where);
}

}  // namespace snug::detail
