#include "src/remat/initialised_parameters.h"

#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/core/has_bytes.h"
#include "src/remat/recorded_step.h"

namespace snug::detail {
namespace {

[[noreturn]] void refuse_to_initialise(const at::Tensor& parameter, std::string_view what_happened) {
  throw PlanningMisuse(fmt::format(
      "Planning: the forward pass {} a parameter of sizes [{}] when it is called first, and not again; planning "
      "calls it several times, and training would not go on from where it began. Call it once before you plan",
      what_happened, fmt::join(parameter.sizes(), ", ")));
}

}  // namespace

void InitialisedParameters::check(const std::vector<at::Tensor>& leaves, const EffectJournal& journal) const {
  for (const at::Tensor& leaf : leaves) {
    const c10::StorageImpl* memory = has_bytes(leaf) ? leaf.storage().unsafeGetStorageImpl() : nullptr;
    if (made_.contains(memory)) {
      refuse_to_initialise(leaf, "makes the values (as by set_data) of");
    }
    if (written_.contains(memory) && !journal.has_written(memory)) {
      refuse_to_initialise(leaf, "writes in place to");
    }
  }
}

void InitialisedParameters::note(const OpTape& tape, const EffectJournal& journal) {
  for (const auto& memory : tape.made_and_alive()) {
    made_.try_emplace(memory._unsafe_get_target(), memory);
  }
  for (const auto& memory : journal.written()) {
    written_.try_emplace(memory._unsafe_get_target(), memory);
  }
}

}  // namespace snug::detail
