#include "snug/stepper.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "bindings/c/arrays.h"
#include "bindings/c/errors.h"
#include "bindings/c/model.h"
#include "bindings/c/step_settings.h"
#include "snug/snapshot.h"
#include "snug/state.h"

struct snug_stepper {
  snug_stepper(const snug_model& of, const snug::c::StepSettings& settings)
      : module(of.module),
        optimizer(settings.make_optimizer(module->parameters())),
        stepper(*module, *optimizer, settings.options) {}

  snug::Batch batch_of(const snug_array* inputs, size_t count) const {
    const size_t wanted = module->input_names().size();
    if (count != wanted) {
      throw snug::ConfigError(fmt::format("snug_stepper: {} arrays for a model of {} inputs", count, wanted));
    }
    return snug::Batch(snug::c::tensors_of(inputs, count));
  }

  snug::Loss loss_of(const snug::Batch& batch) const {
    return snug::Loss::mean(module->loss(batch.tensors()), batch.size());
  }

  std::map<std::string, snug::Stateful> parts() {
    return {{"model", snug::stateful(*module)},
            {"optimizer", snug::stateful(*optimizer)},
            {"stepper", snug::stateful(stepper)},
            {"rng", snug::stateful_rng()}};
  }

  std::shared_ptr<snug::ExportedModule> module;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  snug::Stepper stepper;
  std::string explained;
};

namespace {

using snug::c::guarded;
using snug::c::required;

snug_step step_of(const snug::StepResult& result) {
  return {.size = sizeof(snug_step),
          .loss = result.loss(),
          .grad_norm = result.grad_norm(),
          .seconds = result.seconds,
          .stepped = result.stepped() ? 1 : 0,
          .micro_batches = result.micro_batches,
          .items = result.items,
          .peak_bytes = result.peak_bytes};
}

}  // namespace

snug_status snug_stepper_new(snug_model* model, const char* const* settings, snug_stepper** stepper) {
  return guarded([&] {
    snug_stepper*& result = required(stepper, "snug_stepper_new: stepper");
    result = new snug_stepper(required(model, "snug_stepper_new: model"), snug::c::parse_step_settings(settings));
  });
}

void snug_stepper_free(snug_stepper* stepper) { delete stepper; }

snug_status snug_stepper_step(snug_stepper* stepper, const snug_array* inputs, size_t count, snug_step* result) {
  return guarded([&] {
    snug_stepper& of = required(stepper, "snug_stepper_step: stepper");
    if (result != nullptr && result->size < sizeof(size_t)) {
      throw snug::ConfigError("snug_stepper_step: the size of result is not set; set it to sizeof(snug_step)");
    }
    const snug::StepResult made =
        of.stepper.step(of.batch_of(inputs, count), [&](const snug::Batch& micro) { return of.loss_of(micro); });
    if (result != nullptr) {
      const size_t size = std::min(result->size, sizeof(snug_step));
      snug_step whole = step_of(made);
      whole.size = result->size;
      std::memcpy(result, &whole, size);
    }
  });
}

snug_status snug_stepper_plan(snug_stepper* stepper, const snug_array* inputs, size_t count, int64_t* peak_bytes) {
  return guarded([&] {
    snug_stepper& of = required(stepper, "snug_stepper_plan: stepper");
    const auto plan =
        of.stepper.plan_for(of.batch_of(inputs, count), [&](const snug::Batch& micro) { return of.loss_of(micro); });
    if (peak_bytes != nullptr) {
      *peak_bytes = plan ? plan->choice.peak_bytes : 0;
    }
  });
}

const char* snug_stepper_explain(snug_stepper* stepper) {
  const snug_status status = guarded([&] {
    snug_stepper& of = required(stepper, "snug_stepper_explain: stepper");
    const auto plan = of.stepper.plan();
    of.explained = plan ? plan->explain() : "";
  });
  return status == SNUG_OK ? stepper->explained.c_str() : "";
}

snug_status snug_stepper_set_lr(snug_stepper* stepper, double lr) {
  return guarded([&] {
    if (!(lr >= 0) || std::isinf(lr)) {
      throw snug::ConfigError(fmt::format("snug_stepper_set_lr: lr is {}; give a number of 0 or more", lr));
    }
    for (auto& group : required(stepper, "snug_stepper_set_lr: stepper").optimizer->param_groups()) {
      group.options().set_lr(lr);
    }
  });
}

snug_status snug_stepper_save(snug_stepper* stepper, const char* directory, int64_t step) {
  return guarded([&] {
    snug_stepper& of = required(stepper, "snug_stepper_save: stepper");
    snug::SnapshotStore(&required(directory, "snug_stepper_save: directory")).save(step, of.parts());
  });
}

snug_status snug_stepper_load(snug_stepper* stepper, const char* directory, int64_t* step) {
  return guarded([&] {
    snug_stepper& of = required(stepper, "snug_stepper_load: stepper");
    int64_t& result = required(step, "snug_stepper_load: step");
    result =
        snug::SnapshotStore(&required(directory, "snug_stepper_load: directory")).load_latest(of.parts()).value_or(-1);
  });
}
