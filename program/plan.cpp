// snug plan: bytes and time of a training step under every budget, before anything is trained.

#include "snug/plan.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "program/command.h"
#include "program/run/device.h"
#include "program/run/run_model.h"
#include "program/run/trainer.h"
#include "program/slow_notice.h"
#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/stepper.h"
#include "src/core/allocated_bytes.h"
#include "src/core/file_system.h"
#include "src/planner/curve.h"
#include "src/remat/profile_step.h"

namespace snug::cli {
namespace {

struct PlanFlags {
  std::string model = "gpt-tiny", device = "cpu", memory, run, offload, plans;
  int64_t batch = 64;
  bool offloads = false;  // if `offload` is empty, to host memory
  bool explain = false;
};

const char* samples_of(const PlanFlags& flags) { return is_exported(flags.model) ? "samples" : "sequences"; }

struct PlannedModel {
  PlannedModel(const PlanFlags& flags, c10::Device on);

  c10::Device device;
  RunModel model;
  int64_t parameters, buffers;  // bytes, as the device's allocator counts them
  Batch batch;                  // on the CPU, like data
};

RunModel model_of(const PlanFlags& flags, c10::Device device) {
  const bool may_leave = flags.offloads && !flags.memory.empty();
  return may_leave ? run_model_or_on_host({.model = flags.model}, device) : run_model({.model = flags.model}, device);
}

template <class Tensors>
int64_t bytes_of(const Tensors& tensors) {
  detail::AllocatedBytes bytes;
  for (const at::Tensor& tensor : tensors) {
    bytes.add(tensor);
  }
  return bytes.count();
}

// Bytes and time do not depend on the numbers. 0 is an index, a class and a token of every model.
Batch zeros(const PlanFlags& flags, const std::vector<ExportedModule::Input>& inputs) {
  std::vector<at::Tensor> tensors;
  for (const ExportedModule::Input& input : inputs) {
    tensors.push_back(at::zeros(sizes_of(input, flags.batch), at::TensorOptions().dtype(*input.dtype)));
  }
  return Batch(std::move(tensors));
}

PlannedModel::PlannedModel(const PlanFlags& flags, c10::Device on)
    : device(on),
      model(model_of(flags, on)),
      parameters(bytes_of(model.module->parameters())),
      buffers(bytes_of(std::views::values(model.buffers()))),
      batch(zeros(flags, model.inputs)) {
  if (const int64_t fixed = fixed_samples(model.inputs); fixed > 0 && fixed != flags.batch) {
    throw ConfigError(
        fmt::format("plan: {} was exported for {} samples at a time; give --batch {}, or export it with "
                    "dynamic_shapes",
                    flags.model, fixed, fixed));
  }
}

plan::Profile profile_of(PlannedModel& planned, const PlanFlags& flags) {
  const Batch batch = planned.batch.to(planned.device);
  const auto step = [&] { return planned.model.loss_of(batch).value(); };
  return detail::profile_step(
      step, {.link = flags.offloads ? measure_offload_link(flags.offload, planned.device) : OffloadLink{}});
}

// The techniques of docs/fit.md. Users of the program may not have the page, so the text has the advice itself.
std::string advice(const char* one_device, const char* several) {
  return fmt::format("One device: {}; several: {}.", one_device, several);
}

std::string advice_for_time() {
  return advice("Precision::Auto, snug's optimizers", "DataParallel, more micro-batches a step if the network is slow");
}

// The largest use of bytes, and advice. `of_model`: weights, gradients and AdamW's moments.
std::string verdict(int64_t of_model, int64_t in_all) {
  const double share = static_cast<double>(of_model) / static_cast<double>(in_all);
  return share < 0.5 ? fmt::format("{:.0f} % of it are activations. {}", 100 * (1 - share),
                                   advice("a plan (--memory), smaller micro-batches", "smaller shares of the batch"))
                     : fmt::format("{:.0f} % of it are weights, gradients and optimizer state. {}", 100 * share,
                                   advice("AdamW8bit, weights and state in files (--offload), updates in backward",
                                          "ShardedOptimizer"));
}

// The units of an accelerator, and the reliability of the accelerator's figures.
std::string units(c10::Device device) {
  return device.is_cpu() ? ""
                         : fmt::format(
                               "Bytes are those of the allocator of {}, in blocks of 512; times are between events "
                               "on its stream. The peaks of tensors are exact. Gaps between tensors, and what "
                               "the driver takes, come on top.\n",
                               device.str());
}

void print_curve(PlannedModel& model, const PlanFlags& flags) {
  const plan::Profile profile = profile_of(model, flags);
  const int64_t fixed = 3 * model.parameters + model.buffers;  // weights, AdamW's two moments, buffers
  const plan::Curve curve = plan::curve(plan::Simulator(profile));
  fmt::print(
      "{}, {} {} at once, FP32, AdamW: {} of parameters and optimizer state, and during forward and "
      "backward\n\n{}\n",
      flags.model, flags.batch, samples_of(flags), Bytes(fixed).str(), curve.table());
  constexpr int64_t kKiB = 1024;
  const int64_t least = fixed + curve.smallest_feasible_bytes();
  fmt::print("In all at least {} (--memory {}KiB) at once; with --memory, smaller micro-batches are looked for too.\n",
             Bytes(least).str(), (least + kKiB - 1) / kKiB);
  if (flags.explain) {
    fmt::print("\nThe most frugal plan:\n{}", explain(plan::Simulator(profile), curve.points.back()));
  }
  const int64_t plain = fixed + curve.points.front().plain_peak_bytes;
  fmt::print("{}The plain step takes {}; {}\n", units(model.device), Bytes(plain).str(),
             verdict(4 * model.parameters, plain));
}

// Prints the choice of snug train. Without --offload, budgets smaller than model and optimizer alone are not tried.
void print_choice(PlannedModel& model, const PlanFlags& flags) {
  const Bytes budget = Bytes::parse(flags.memory);
  AdamW optimizer(model.model.module->parameters());
  std::optional<std::filesystem::path> offload;
  if (flags.offloads) {
    offload = flags.offload;
  }
  const Bytes least = flags.offloads
                          ? Bytes(0)
                          : MemoryLimit::smallest(model.device) + Bytes(3 * model.parameters);  // gradients, moments
  Stepper stepper(*model.model.module, optimizer,
                  {.budget = {.memory = std::max(budget, least), .plan_folder = flags.plans, .offload = offload}});
  Bytes takes = Bytes::unlimited();
  try {
    const auto plan = stepper.plan_for(model.batch, model.model.loss_of);
    takes = Bytes(plan->choice.peak_bytes);
    if (takes <= budget) {
      const bool is_plain =
          plan->choice.micro_batches == 1 && !plan->activations && plan->slices == 1 && plan->placement == Placement();
      const std::string file = plan->read_from.empty() ? "" : fmt::format("Read from {}.\n", plan->read_from.string());
      fmt::print("{}\n{}{}{}\n", flags.explain ? plan->explain() : file + plan->considered, units(model.device),
                 plan->verdict(), is_plain ? " What is short is time. " + advice_for_time() : "");
      return;
    }
  } catch (const BudgetExceeded& error) {
    if (error.smallest_feasible().count() == 0) {
      throw;  // nothing runs in so few bytes, so the need is unknown
    }
    takes = error.smallest_feasible();
  }
  throw BudgetExceeded(
      fmt::format("plan: {} with a batch of {} does not fit into {}; {} ({} bytes) would do; {}", flags.model,
                  flags.batch, budget.str(), takes.str(), takes.count(), verdict(4 * model.parameters, takes.count())),
      takes);
}

void print_plan_of_run(const std::filesystem::path& out) {
  const auto path = Trainer::plan_path(out);
  if (!std::filesystem::exists(path)) {
    throw ConfigError(
        fmt::format("plan: there is no plan in '{}'; a run has one if it was given --memory", out.string()));
  }
  fmt::print("{}", StepPlan::from_json(detail::FileSystem::real().read_file(path)).explain());
}

void check(const CLI::App& command) {
  for (const char* const option : {"--model", "--batch", "--device", "--memory", "--offload", "--plans"}) {
    if (command.count("--run") > 0 && command.count(option) > 0) {
      throw ConfigError(fmt::format(
          "plan: --run explains the plan that a run has, and {} is for a new one; leave one of them out", option));
    }
  }
  if (command.count("--plans") > 0 && command.count("--memory") == 0) {
    throw ConfigError("plan: --plans keeps the plan for a budget; give --memory, too");
  }
}

void run_plan(const PlanFlags& flags) {
  if (!flags.run.empty()) {
    print_plan_of_run(flags.run);
    return;
  }
  if (flags.batch < 1) {
    throw ConfigError(fmt::format("plan: --batch is {}; give a number >= 1", flags.batch));
  }
  const c10::Device device = make_current(parse_device("plan", flags.device));
  use_growing_segments(device);
  if (flags.offloads && device.is_cpu() == flags.offload.empty()) {
    throw ConfigError(device.is_cpu() ? "plan: --offload is empty; give a directory on a disk"
                                      : "plan: memory of a device goes to host memory; give --offload no directory");
  }
  const SlowNotice planning(fmt::format("plan: steps of {} are tried with {} {}, and plans are searched for",
                                        flags.model, flags.batch, samples_of(flags)));
  PlannedModel model(flags, device);
  if (flags.memory.empty()) {
    print_curve(model, flags);
  } else {
    print_choice(model, flags);
  }
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Show what a training step takes under every budget");
  const auto flags = std::make_shared<PlanFlags>();
  command->add_option("--model", flags->model, "As for snug train")->type_name("NAME")->capture_default_str();
  command->add_option("--batch", flags->batch, "Sequences, or other samples, in a step")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu, cuda, cuda:1, or what else LibTorch finds")
      ->type_name("DEVICE")
      ->capture_default_str();
  command->add_option("--memory", flags->memory, "A budget, such as 300MiB: the fastest step that fits")
      ->type_name("BYTES");
  command
      ->add_option("--offload", flags->offload,
                   "Activations may go elsewhere meanwhile, and with --memory the optimizer's state, gradients and "
                   "weights: of a CPU to a directory on a disk, else to host memory")
      ->type_name("DIR")
      ->expected(0, 1);
  command->add_option("--plans", flags->plans, "With --memory: a directory that keeps the plan for the next call")
      ->type_name("DIR");
  command->add_flag("--explain", flags->explain, "What is alive at the peak, and what is rebuilt");
  command->add_option("--run", flags->run, "Explain the plan of a run instead: its folder")->type_name("DIR");
  command->footer("Runs steps on zeros: without --memory with everything kept, with it within the budget.");
  command->callback([command, flags] {
    check(*command);
    flags->offloads = command->count("--offload") > 0;
    run_plan(*flags);
  });
}

}  // namespace snug::cli
