#pragma once
// Replaced: gives a variable, such as a variable of this thread, another value while a scope lasts.

#include <utility>

namespace snug::detail {

/// `place` has `value` until the end of the scope, and then the earlier value again.
template <class T>
class [[nodiscard]] Replaced final {
 public:
  Replaced(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~Replaced() { place_ = std::move(before_); }
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

 private:
  T& place_;
  T before_;
};

}  // namespace snug::detail
