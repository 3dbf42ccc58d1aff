#pragma once
// Memory that snug takes for its own bookkeeping while it records a step: it is none of the step's.

namespace snug::detail {

/// While it lives, what this thread allocates is no part of a step that is recorded.
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
