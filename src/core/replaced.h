#pragma once
// Replaced: a variable, such as one of this thread, that has another value while a scope lasts.

#include <utility>

namespace snug::detail {

/// `place` has `value` while it lives, and then again what it had before.
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
