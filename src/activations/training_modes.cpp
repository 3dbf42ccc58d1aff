#include "src/activations/training_modes.h"

#include <algorithm>

#include <torch/nn/module.h>

namespace snug::detail {

TrainingModes::TrainingModes(const std::shared_ptr<torch::nn::Module>& root) {
  if (root == nullptr) {
    return;
  }
  for (auto& module : root->modules()) {
    const bool is_training = module->is_training();
    modes_.emplace_back(std::move(module), is_training);
  }
}

// train() sets the modes of all inner modules too, so a module's own mode is set after the modes of the modules around.
void TrainingModes::set() const {
  for (const auto& [module, is_training] : modes_) {
    module->train(is_training);
  }
}

TrainingModes::Scope::Scope(const TrainingModes& modes) {
  const auto differs = [](const auto& noted) { return noted.first->is_training() != noted.second; };
  if (std::any_of(modes.modes_.begin(), modes.modes_.end(), differs)) {
    before_ = std::make_unique<TrainingModes>(modes.modes_.front().first);
    modes.set();
  }
}

TrainingModes::Scope::~Scope() {
  if (before_ != nullptr) {
    before_->set();
  }
}

}  // namespace snug::detail
