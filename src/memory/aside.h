#pragma once
// Memory that snug takes for bookkeeping while snug records a step. Bookkeeping memory is not part of the step.

namespace snug::detail {

/// Excludes this thread's allocations from a recorded step until the end of the scope.
class [[nodiscard]] Aside final {
 public:
  Aside() { ++depth(); }
  ~Aside() { --depth(); }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

  static bool is_now() noexcept { return depth() > 0; }

 private:
  static int& depth() noexcept {
    thread_local int scopes = 0;
    return scopes;
  }
};

}  // namespace snug::detail
