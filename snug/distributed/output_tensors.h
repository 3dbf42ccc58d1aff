#pragma once
// collect_tensors: the tensors in the result of a forward function, by which backward passes from that result are
// recognised.

#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Appends the tensors in `value`: a tensor, an object with value() (std::optional, Loss), or ranges and tuples of
/// such. Other values are skipped.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) {
      tensors.push_back(value);
    }
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) {
      collect_tensors(*value, tensors);
    }
  } else if constexpr (requires { collect_tensors(value.value(), tensors); }) {
    collect_tensors(value.value(), tensors);
  } else if constexpr (std::ranges::range<const T>) {
    if constexpr (!std::is_convertible_v<const T&, std::string>) {
      for (const auto& element : value) {
        collect_tensors(element, tensors);
      }
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... elements) { (collect_tensors(elements, tensors), ...); }, value);
  }
}

}  // namespace snug::detail
