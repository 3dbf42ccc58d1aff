#pragma once
// SameLosses: finds models that keep state which planning cannot put back.

#include <bit>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/DynamicCast.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/memory/operator_mode.h"
#include "src/remat/recorded_step.h"

namespace snug::detail {

/// Compares losses of the same forward pass, repeated with the same parameters, buffers and generators. If the losses
/// differ, planning has changed other state of the model: throws PlanningMisuse.
class SameLosses {
 public:
  /// `who`: the function that plans, for the message. `another_cure`: a further cure for the message, in words.
  explicit SameLosses(std::string who, std::string another_cure = {})
      : who_(std::move(who)), another_cure_(std::move(another_cure)) {}

  std::function<at::Tensor()> of(std::function<at::Tensor()> forward) {
    return [this, forward = std::move(forward)] {
      at::Tensor loss = forward();
      if (loss.defined() && loss.numel() == 1 && loss.layout() == at::kStrided) {
        const UnseenOperators not_recorded;
        const at::Tensor host = loss.detach().to(at::kCPU);
        note(c10::fetch_and_cast<double>(host.scalar_type(), host.const_data_ptr()));
      }
      return loss;
    };
  }

 private:
  // If the generators end otherwise, another thread has drawn numbers in between, and the losses prove nothing.
  void note(double loss) {
    const RngState generators = RngState::capture();
    if (!first_) {
      first_.emplace(loss, generators);
      return;
    }
    if (std::bit_cast<uint64_t>(first_->first) != std::bit_cast<uint64_t>(loss) && first_->second == generators) {
      throw PlanningMisuse(fmt::format(
          "{}: planning runs forward several times, and on the same items it gave the losses {} and {}; the model or its "
          "loss keeps something besides parameters, buffers and default generators, as a hidden state in a member, a "
          "counter or random numbers of its own, and training would go on from where planning left it; or only the first "
          "call sets a parameter, as in lazy modules (then call it once before); or it does not compute the same each "
          "time. Keep state in a registered buffer, or give it with the batch (in C++ write the buffer in place; "
          "BudgetOptions::carried says how to name tensors that are assigned anew){}",
          who_, first_->first, loss, another_cure_));
    }
  }

  std::string who_, another_cure_;
  std::optional<std::pair<double, RngState>> first_;  // the first loss, and the generators after the first loss
};

}  // namespace snug::detail
