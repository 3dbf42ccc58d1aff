#include "src/optim/state_archive.h"

#include <string>
#include <type_traits>
#include <variant>

#include <ATen/core/ivalue.h>
#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {

void write_state(torch::serialize::OutputArchive& archive, const StateDict& state) {
  for (const auto& [name, value] : state.entries()) {
    std::visit(
        [&, &key = name](const auto& v) {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, StateDict>) {
            torch::serialize::OutputArchive nested(archive.compilation_unit());
            write_state(nested, v);
            archive.write(key, nested);
          } else {
            archive.write(key, c10::IValue(v));
          }
        },
        value);
  }
}

StateDict read_state(torch::serialize::InputArchive& archive) {
  StateDict state;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isTensor()) {
      state.set(key, value.toTensor());
    } else if (value.isInt()) {
      state.set(key, value.toInt());
    } else if (value.isDouble()) {
      state.set(key, value.toDouble());
    } else if (value.isBool()) {
      state.set(key, value.toBool());
    } else if (value.isString()) {
      state.set(key, value.toStringRef());
    } else if (value.isModule()) {
      torch::serialize::InputArchive nested;
      archive.read(key, nested);
      state.set(key, read_state(nested));
    } else {
      throw CorruptFile(
          fmt::format("optimizer archive: '{}' holds a {}, which no state of ours has; was it saved by another "
                      "optimizer?",
                      key, value.tagKind()));
    }
  }
  return state;
}

}  // namespace snug::detail
