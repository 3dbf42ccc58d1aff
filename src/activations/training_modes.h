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
  /// Notes the mode of `root` and of all modules in it; of none if `root` is null.
  explicit TrainingModes(const std::shared_ptr<torch::nn::Module>& root);

  /// While it lives, the noted modes are set; at the end, those that it found. Touches nothing if all modes are as
  /// noted.
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

}  // namespace snug::detail
