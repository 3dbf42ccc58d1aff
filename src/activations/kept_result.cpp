#include "src/activations/kept_result.h"

#include <algorithm>

namespace snug::detail {

bool KeptResult::is_intact() const {
  return std::none_of(values.begin(), values.end(),
                      [](const Value& value) { return value.writes && value.writes->moved(); }) &&
         std::none_of(aliases.begin(), aliases.end(), [](const WriteCount& one) { return one.moved(); });
}

void KeptResult::note_alias(const at::Tensor& tensor) {
  const void* counter = WriteCount::counter_of(tensor);
  const bool is_known =
      counter == nullptr ||
      std::any_of(values.begin(), values.end(),
                  [&](const Value& value) { return value.writes && value.writes->counter() == counter; }) ||
      std::any_of(aliases.begin(), aliases.end(), [&](const WriteCount& one) { return one.counter() == counter; });
  if (!is_known) {
    aliases.emplace_back(tensor);
  }
}

void KeptResult::expect_write(const void* counter) {
  for (Value& value : values) {
    if (value.writes && value.writes->counter() == counter) {
      value.writes->expect();
    }
  }
  for (WriteCount& one : aliases) {
    if (one.counter() == counter) {
      one.expect();
    }
  }
}

void KeptResult::pack() {
  for (Value& value : values) {
    if (value.as_it_is.isTensor() && value.writes) {
      value.packed = packer->pack(value.as_it_is.toTensor());
      value.as_it_is = {};  // the count stays: the packed value may still be the result's own memory
    }
  }
}

bool KeptResult::is_packed() const {
  return std::any_of(values.begin(), values.end(), [](const Value& value) { return value.packed.has_value(); });
}

KeptResult* KeptResults::find(CallKey key) {
  const auto found = results.find(key);
  return found == results.end() ? nullptr : &found->second;
}

void KeptResults::drop(CallKey key) {
  const auto found = results.find(key);
  for (const CallKey one : found->second.absorbed) {  // absorbed through any storage of the result
    absorbed.erase(one);
  }
  results.erase(found);
}

void KeptResults::close() {
  std::vector<CallKey> written;
  for (auto& [key, result] : results) {
    if (!result.is_intact()) {
      written.push_back(key);
      continue;
    }
    for (KeptResult::Value& value : result.values) {
      if (value.writes) {
        value.writes->accept();
      }
    }
    for (WriteCount& one : result.aliases) {
      one.accept();
    }
  }
  for (const CallKey key : written) {
    drop(key);
  }
}

}  // namespace snug::detail
