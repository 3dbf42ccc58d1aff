#include "src/step/step_ranks.h"

namespace snug::detail {

std::vector<const ProcessGroup*> groups_in_forward(const torch::nn::Module& model, bool in_training) {
  std::vector<const ProcessGroup*> groups;
  model.apply([&](const torch::nn::Module& module) {
    const auto* sender = dynamic_cast<const SendsInForward*>(&module);
    const ProcessGroup* group = sender != nullptr ? sender->sends_over() : nullptr;
    if (group != nullptr && (module.is_training() || !in_training)) {
      groups.push_back(group);
    }
  });
  return groups;
}

}  // namespace snug::detail
