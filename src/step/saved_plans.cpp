#include "src/step/saved_plans.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/bytes_hash.h"
#include "src/core/file_system.h"
#include "src/core/versioned_json.h"
#include "src/remat/activation_plan.h"

namespace snug::detail {
namespace {

using Json = OrderedJson;

constexpr JsonKind kPlanFileJson{
    .key = "snug_plan_file", .type = "plan_folder", .noun = "file of plans", .cure = "plan again", .version = 2};

void require(bool holds, const char* what) {
  if (!holds) {
    throw ConfigError(fmt::format("plan_folder: a plan's {}", what));
  }
}

// Calls f(key, number).
template <class Counts, class F>
void each_count(Counts& counts, const F& f) {
  f("batch", counts.batch);
  f("at_most", counts.at_most);
  f("fixed_bytes", counts.fixed_bytes);
  f("effect_bytes", counts.effect_bytes);
  f("kept_bytes", counts.kept_bytes);
  f("idle_state_bytes", counts.idle_state_bytes);
  f("gradient_bytes", counts.gradient_bytes);
  f("optimizer_bytes", counts.optimizer_bytes);
  f("moved_bytes", counts.state_in_file.moved);
  f("workspace_in_file", counts.state_in_file.workspace);
  f("moved_model_bytes", counts.model_in_file.moved);
  f("beside_model_bytes", counts.model_in_file.beside);
  f("left_free", counts.left_free);
}

// A StepKind as three fields of an object. The object may have other fields.
Json json_of(const StepKind& kind) {
  Json tensors = Json::array();
  for (const auto& [type, sizes] : kind.shape.tensors) {
    tensors.push_back({static_cast<int>(type), sizes});
  }
  return {{"modes", kind.modes}, {"trained", kind.trained}, {"tensors", tensors}};
}

// Throws nlohmann's exceptions if a field is missing or of another type, and CorruptFile for sizes that no tensor has.
StepKind kind_from(const Json& json) {
  constexpr int64_t kMost = int64_t{1} << 48;  // elements; a comparison of kinds multiplies the sizes
  StepKind kind{.modes = whole_number<uint32_t>(json.at("modes")),
                .trained = whole_number<uint32_t>(json.at("trained"))};
  for (const Json& tensor : json.at("tensors")) {
    std::vector<int64_t> sizes;
    int64_t product = 1;
    for (const Json& size : tensor.at(1).get_ref<const Json::array_t&>()) {
      sizes.push_back(whole_number<int64_t>(size));
      if (sizes.back() < 0 || sizes.back() >= kMost / product) {
        throw CorruptFile(fmt::format("Stepper: the plan of a step has a tensor of the sizes {}", tensor.at(1).dump()));
      }
      product *= std::max<int64_t>(sizes.back(), 1);
    }
    kind.shape.tensors.emplace_back(static_cast<at::ScalarType>(whole_number<int>(tensor.at(0))), std::move(sizes));
  }
  return kind;
}

StepCounts counts_from(const Json& json) {
  constexpr int64_t kMostBytes = int64_t{1} << 56;  // sums of several do not overflow
  StepCounts counts;
  each_count(counts, [&](const char* key, int64_t& number) {
    number = whole_number<int64_t>(json.at(key));
    const bool is_bytes = key != std::string_view("at_most");
    require(!is_bytes || std::abs(number) < kMostBytes, "bytes cannot be");
  });
  return counts;
}

void check_run(const ActivationPlan& of_one, const plan::Solution& choice) {
  require(solution_of(of_one) == choice, "choice is of other operators");
  const plan::Simulation run = PlanContent::of(of_one).simulator().run(choice.stays);
  require(run.peak_bytes == choice.peak_bytes, "peak is not that of its operators");
}

void check(const SavedPlan& saved) {
  const auto& [kind, counts, plan, recorded] = saved;
  const StepChoice& choice = plan.choice;
  require(counts.batch > 0 && choice.items > 0 && choice.items <= counts.batch && counts.at_most > 0 &&
              choice.micro_batches == (counts.batch - 1) / choice.items + 1 && plan.slices > 0 &&
              plan.slices <= kMostSlices,
          "micro-batch cannot be");
  require(counts.state_in_file.moved >= 0 && counts.state_in_file.workspace >= 0, "state has no such bytes");
  require(counts.model_in_file.moved >= 0 && counts.model_in_file.beside >= 0, "model has no such bytes");
  const StepMemory memory = counts.memory(plan.placement);
  for (const int64_t bytes : {memory.fixed, memory.gradients, memory.workspace, counts.effect_bytes, counts.kept_bytes,
                              counts.idle_state_bytes, counts.left_free, choice.peak_bytes, choice.plan->peak_bytes}) {
    require(bytes >= 0 && bytes <= plan.budget_bytes, "bytes are not within its budget");
  }
  require(plan.activations.has_value() != recorded.has_value(), "operators are missing");
  check_run(recorded ? *recorded : *plan.activations, *choice.plan);
}

}  // namespace

const StepChoices::Choice* StepChoices::find(const StepToPlan& step) const {
  const Choice* found = nullptr;
  for (const Choice& choice : choices_) {
    // A batch that was not cut tells nothing about larger batches.
    const bool large_enough = step.counts.batch <= choice.batch || choice.items < choice.batch;
    if (large_enough && covers(choice.kind, step.kind) && (found == nullptr || choice.kind == step.kind)) {
      found = &choice;
    }
  }
  const auto growth_of = [&](const Choice& choice) {
    return growth(choice.kind, choice.items, choice.items < choice.batch, step);
  };
  return found != nullptr ? found : closest(choices_, growth_of);
}

void StepChoices::remember(Choice choice) {
  std::erase_if(choices_,
                [&](const Choice& old) { return old.batch <= choice.batch && covers(choice.kind, old.kind); });
  choices_.push_back(std::move(choice));
}

std::string StepChoices::to_text() const {
  Json all = Json::array();
  for (const Choice& choice : choices_) {
    Json one = json_of(choice.kind);
    one.update({{"batch", choice.batch}, {"items", choice.items}, {"slices", choice.slices}});
    all.push_back(std::move(one));
  }
  return all.dump();
}

StepChoices StepChoices::parse(const std::string& text) {
  StepChoices result;
  try {
    for (const Json& one : parse_json<Json>(text)) {
      Choice choice{.kind = kind_from(one),
                    .batch = whole_number<int64_t>(one.at("batch")),
                    .items = whole_number<int64_t>(one.at("items")),
                    .slices = one.contains("slices") ? whole_number<int64_t>(one["slices"]) : 1};
      if (choice.items < 1 || choice.items > choice.batch || choice.slices < 1 || choice.slices > kMostSlices) {
        throw CorruptFile(fmt::format("Stepper.load_state_dict: a micro-batch of {} items of {} in {} slices cannot be",
                                      choice.items, choice.batch, choice.slices));
      }
      result.choices_.push_back(std::move(choice));
    }
  } catch (const Json::exception& error) {
    throw CorruptFile(fmt::format("Stepper.load_state_dict: micro_batches is not as saved: {}", error.what()));
  }
  return result;
}

// --- the file of plans

PlanFile::PlanFile(const std::filesystem::path& folder, std::string holds_for)
    : holds_for_(std::move(holds_for)),
      path_(folder / fmt::format("plan-{:016x}.json", bytes_hash(holds_for_.data(), holds_for_.size()))) {}

std::vector<SavedPlan> PlanFile::read() const {
  const FileSystem& files = FileSystem::real();
  if (!files.exists(path_)) {
    return {};
  }
  return read_versioned_json(kPlanFileJson, files.read_file(path_), [this](const Json& json) {
    if (json.at("holds_for").get<std::string>() != holds_for_) {
      throw ConfigError("plan_folder: the file is of another model, optimizer or version");
    }
    std::vector<SavedPlan> all;
    for (const Json& one : json.at("plans")) {
      SavedPlan saved{
          .kind = kind_from(one), .counts = counts_from(one), .plan = StepPlan::from_json(one.at("plan").dump())};
      if (one.contains("recorded")) {
        saved.recorded = ActivationPlan::from_json(one.at("recorded").dump());
      }
      check(saved);
      saved.plan.read_from = path_;
      all.push_back(std::move(saved));
    }
    return all;
  });
}

void PlanFile::write(const std::vector<SavedPlan>& plans) const {
  Json all = Json::array();
  for (const SavedPlan& saved : plans) {
    Json one;
    each_count(saved.counts, [&](const char* key, int64_t number) { one[key] = number; });
    one.update(json_of(saved.kind));
    one["plan"] = Json::parse(saved.plan.to_json());
    if (saved.recorded) {
      one["recorded"] = Json::parse(saved.recorded->to_json());
    }
    all.push_back(std::move(one));
  }
  FileSystem::real().create_directories(path_.parent_path());
  replace_file(path_, versioned_json(kPlanFileJson, {{"holds_for", holds_for_}, {"plans", all}}).dump());
}

}  // namespace snug::detail
