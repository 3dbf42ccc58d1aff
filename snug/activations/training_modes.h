#pragma once
// Which modules were training and which evaluating when a checkpointed region ran, to be so again when it is recomputed.

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace snug::detail {

class TrainingModes {
 public:
  /// Notes the mode of `root` and of all modules in it; of none if it is null.
  explicit TrainingModes(const std::shared_ptr<torch::nn::Module>& root);

  /// Puts the noted modes in place while it lives, and then those that it found. Touches nothing where all are as noted.
  class [[nodiscard]] Scope final {
   public:
    explicit Scope(const TrainingModes& modes);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::unique_ptr<TrainingModes> before_;  // null: nothing was changed
  };

 private:
  void set() const;

  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // a module before those in it
};

/// The module that a callable is the holder of, such as a torch::nn::Sequential; else null.
template <class F>
std::shared_ptr<torch::nn::Module> module_of(const F& callable) {
  if constexpr (requires { callable.ptr(); }) {
    if constexpr (std::is_convertible_v<decltype(callable.ptr()), std::shared_ptr<torch::nn::Module>>) {
      return callable.ptr();
    }
  }
  return nullptr;
}

}  // namespace snug::detail
