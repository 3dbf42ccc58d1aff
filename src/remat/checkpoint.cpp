#include "snug/checkpoint.h"

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <c10/core/GradMode.h>

#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/remat/op_tape.h"

namespace snug::detail {

class Region {
 public:
  explicit Region(CheckpointOptions options)
      : tape_(std::make_shared<OpTape>(TapeRegion{
            .name = options.label.empty() ? "checkpoint" : "checkpoint '" + options.label + "'",
            .policy = std::move(options.policy),
            .outside = current_policy(),
        })),
        saved_(tape_),
        operators_(std::in_place, *tape_) {}

  ~Region() {
    operators_.reset();
    saved_.reset();
    try {
      tape_->close();
    } catch (const std::exception&) {  // backward reports a value that cannot come back
    }
  }

 private:
  std::shared_ptr<OpTape> tape_;
  std::optional<PolicyScope> saved_;
  std::optional<OperatorScope> operators_;
};

CheckpointScope::CheckpointScope(CheckpointOptions options)
    : region_(c10::GradMode::is_enabled() ? std::make_unique<Region>(std::move(options)) : nullptr) {}

CheckpointScope::~CheckpointScope() = default;

}  // namespace snug::detail
