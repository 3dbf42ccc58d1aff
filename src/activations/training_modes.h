#pragma once
// The modes (training or evaluation) of modules at the time a checkpointed region ran, for its recomputation.

#include <memory>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace snug::detail {

class TrainingModes {
 public:
  /// Notes the modes of `root` and of all modules in `root`; no modes if `root` is null.
  explicit TrainingModes(const std::shared_ptr<torch::nn::Module>& root);

  /// Sets the noted modes, and at its end the modes from before. Touches nothing if all modes equal the noted modes.
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

  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // a module before the modules in it
};

}  // namespace snug::detail
