#pragma once
// visit_tensors(value, f): calls f(Tensor&) for every tensor inside nested standard containers, in a fixed order. Other
// values are skipped.

#include <concepts>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

namespace snug::detail {

template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; } && !std::ranges::range<T>;

template <class T>
concept OptionalLike = requires(T& value) {
  value.has_value();
  *value;
};

template <class T>
concept MapLike = requires { typename T::mapped_type; };

// A view shows elements that something else owns. It is recognised by elements that can be written although the view
// itself is const.
template <class T>
concept ViewLike = std::ranges::range<T> && !std::is_arithmetic_v<std::ranges::range_value_t<T>> &&
                   (std::ranges::view<T> || requires(const T& range) {
                     { *std::ranges::begin(range) } -> std::same_as<std::ranges::range_value_t<T>&>;
                   });

template <class T, class F>
void visit_tensors(T& value, F&& f) {
  static_assert(
      !std::is_same_v<T, const at::Tensor> && !ViewLike<T>,
      "a view such as at::TensorList or std::span does not keep its tensors until backward; pass a std::vector");
  if constexpr (std::is_same_v<T, at::Tensor>) {
    f(value);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) {
      visit_tensors(*value, f);
    }
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, f), ...); }, value);
  } else if constexpr (MapLike<T>) {
    for (auto& entry : value) {
      visit_tensors(entry.second, f);
    }
  } else if constexpr (std::ranges::range<T> && !std::is_same_v<T, std::string>) {
    if constexpr (std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>) {
      for (auto& element : value) {
        visit_tensors(element, f);
      }
    }
  }
}

}  // namespace snug::detail
