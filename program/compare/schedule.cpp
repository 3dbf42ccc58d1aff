#include "program/compare/schedule.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/core.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace snug::cli {

using namespace measure;

namespace {

using at::Tensor;
using What = BlockRun::What;

constexpr int64_t kBlocks = 12, kItems = 256, kBlockWidth = 64;

class Recorder;
Recorder* recorder = nullptr;  // one recorder at a time, for any thread of backward

// Records the runs of the blocks while a Recorder lives. Only the last result of a block may be in memory for others.
class Recorder {
 public:
  Recorder() { recorder = this; }
  ~Recorder() { recorder = nullptr; }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void went_forward(int64_t block, const Tensor& result) {
    look();
    const bool is_first =
        std::none_of(runs_.begin(), runs_.end(), [&](const BlockRun& run) { return run.block == block; });
    runs_.push_back({is_first ? What::Forward : What::Again, block});
    results_.emplace_back(runs_.size() - 1, result.storage().getWeakStorageImpl());
  }

  void forward_is_over() {
    look();
    for (const auto& [run, result] : results_) {
      runs_[run].is_kept = true;
    }
  }

  void went_backward(int64_t block) {
    look();
    runs_.push_back({What::Backward, block});
  }

  std::vector<BlockRun> runs() {
    look();
    return runs_;
  }

 private:
  // A result that is gone now was in memory until the last run.
  void look() {
    std::erase_if(results_, [&](const auto& result) {
      if (!result.second.expired()) {
        return false;
      }
      runs_[result.first].kept_until = static_cast<int64_t>(runs_.size());
      return true;
    });
  }

  std::vector<BlockRun> runs_;
  std::vector<std::pair<size_t, c10::weak_intrusive_ptr<c10::StorageImpl>>> results_;  // the results in memory
};

// The matrix product of a block is an operator of its own. So a Recorder also sees runs of operators without the
// model's code, as under an automatic plan.
Tensor run_block(const Tensor& x, const Tensor& weight, int64_t block) {
  Tensor result = at::mm(x, weight);
  if (recorder != nullptr) {
    recorder->went_forward(block, result);
  }
  return result;
}

TORCH_LIBRARY(snug_compare, library) { library.def("block(Tensor x, Tensor weight, int block) -> Tensor"); }

TORCH_LIBRARY_IMPL(snug_compare, CompositeExplicitAutograd, library) { library.impl("block", run_block); }

class Product : public torch::autograd::Function<Product> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        int64_t block) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::AutoGradMode in_graph(true);  // a checkpointed region makes values of the graph again
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("snug_compare::block", "")
                               .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
    context->save_for_backward({x, weight});
    context->saved_data["block"] = block;
    return op.call(x, weight, block);
  }

  static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, const std::vector<Tensor>& gradients) {
    // Dropped results are made again inside get_saved_variables.
    const std::vector<Tensor> saved = context->get_saved_variables();
    if (recorder != nullptr) {
      recorder->went_backward(context->saved_data["block"].toInt());
    }
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0]), Tensor()};
  }
};

DeepModel chain() {
  torch::manual_seed(1);
  const auto module = std::make_shared<torch::nn::Module>();
  DeepModel model{.name = "blocks", .what = "a chain of equal blocks", .module = module, .layers = {}, .batch = kItems};
  for (int64_t block = 1; block <= kBlocks; ++block) {
    const Tensor weight = module->register_parameter(
        fmt::format("weight{}", block), torch::randn({kBlockWidth, kBlockWidth}) * std::sqrt(2.0 / kBlockWidth));
    model.layers.emplace_back([weight, block](const Tensor& x) { return Product::apply(x, weight, block).relu_(); });
  }
  model.input = [](int64_t items) { return torch::randn({items, kBlockWidth}); };
  model.loss = [](const Tensor& x, const Layer& run) { return run(x).square().mean(); };
  return model;
}

Schedule::Way recorded(const std::string& name, const DeepModel& model, const std::function<Tensor()>& forward) {
  drop_gradients(model.parameters());
  Recorder here;
  const Tensor loss = forward();
  here.forward_is_over();
  loss.backward();
  return {.name = name, .runs = here.runs()};
}

struct NamedPlan {
  std::string name;
  ActivationPlan plan;
};

// The fastest plan that takes no more bytes than sqrt(n) segments; `forward` runs the segments. If a plan needs more
// bytes, the fastest plan in the least bytes of a plan.
NamedPlan plan_in_the_bytes_of_segments(const std::function<Tensor()>& forward, const DeepModel& model,
                                        const std::function<Tensor()>& plain) {
  const std::vector<Tensor> parameters = model.parameters();
  const int64_t bytes = bytes_of_step(parameters, [&] { forward().backward(); }).peak;
  drop_gradients(parameters);
  const plan::Profile profile = detail::profile_step(plain);
  const int64_t least = least_bytes_of_plan(profile);
  const std::string times =
      least > bytes ? fmt::format("{:.2f} times ", static_cast<double>(least) / static_cast<double>(bytes)) : "";
  return {.name = fmt::format("automatic, in {}the bytes of sqrt(n) segments", times),
          .plan = detail::unverified_plan(profile, Bytes(std::max(bytes, least)))};
}

}  // namespace

Schedule recorded_schedule(c10::Device device) {
  const DeepModel model = on_device(chain(), device);
  const Tensor input = model.input(model.batch);
  const std::vector<Technique> techniques = techniques_for(model);
  const auto way = [&](const std::string& begin) -> std::function<Tensor()> {
    const auto technique = std::find_if(techniques.begin(), techniques.end(), [&](const Technique& t) {
      return t.name == begin || t.label.starts_with(begin);
    });
    if (technique == techniques.end()) {
      throw Error(fmt::format("compare: no technique begins with '{}'; see techniques_for", begin));
    }
    return [&model, input, technique = *technique] { return forward_under(technique, model, input); };
  };
  const std::function<Tensor()> plain = way("plain"), segments = way("sqrt(n)");
  const NamedPlan automatic = plan_in_the_bytes_of_segments(segments, model, plain);
  return {.blocks = kBlocks,
          .ways = {recorded("plain", model, plain), recorded("sqrt(n) segments", model, segments),
                   recorded("nested", model, way("nested")),
                   recorded(automatic.name, model, under_plan(plain, automatic.plan))}};
}

Exhibit schedule_exhibit(Schedule schedule) {
  return {
      .file = "checkpointing-schedule",
      .title = "What is kept, dropped and run again",
      .caption = "a chain of equal blocks, forward and backward",
      .made = fmt::format("{} blocks of a matrix product and ReLU, which wrote down when they ran and how long their "
                          "results were in memory; {} x {} numbers each.",
                          schedule.blocks, kItems, kBlockWidth),
      .content = std::move(schedule)};
}

std::string schedule_finding(const Schedule& schedule) {
  std::string text = fmt::format("{} equal blocks, recorded:", schedule.blocks);
  for (const Schedule::Way& way : schedule.ways) {
    text += fmt::format("{} {}: at most {} results in memory, {} runs again", &way == &schedule.ways.front() ? "" : ";",
                        way.name, way.most_kept(), way.runs_again());
  }
  return text + ".";
}

}  // namespace snug::cli
