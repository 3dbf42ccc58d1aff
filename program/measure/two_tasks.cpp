#include "program/measure/two_tasks.h"

#include <numbers>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "program/measure/measure.h"
#include "program/run/device.h"
#include "snug/adamw.h"
#include "snug/autocast.h"
#include "snug/stepper.h"

namespace snug::measure {

TwoTasksImpl::TwoTasksImpl(int64_t width) {
  const auto linear = [](int64_t in, int64_t out) { return torch::nn::Linear(in, out); };
  trunk = register_module("trunk", torch::nn::Sequential(linear(1, width), torch::nn::ReLU(), linear(width, width),
                                                         torch::nn::ReLU(), linear(width, width), torch::nn::ReLU()));
  sine = register_module("sine", torch::nn::Sequential(linear(width, width), torch::nn::ReLU(), linear(width, 1)));
  cosine = register_module("cosine", torch::nn::Sequential(linear(width, width), torch::nn::ReLU(), linear(width, 1)));
}

at::Tensor TwoTasksImpl::forward(const at::Tensor& x) {
  const at::Tensor h = trunk->forward(x);
  return torch::cat({sine->forward(h), cosine->forward(h)}, 1);
}

TwoTasksData two_tasks_data(int64_t points, c10::Device device) {
  torch::manual_seed(1);
  const double end = 2 * std::numbers::pi;
  const at::Tensor x = torch::linspace(-end, end, points).index_select(0, torch::randperm(points)).unsqueeze(1);
  const at::Tensor truth = torch::cat({x.sin(), x.cos()}, 1);
  return {x.to(device), (truth + 0.02 * torch::rand_like(truth) - 0.01).to(device)};
}

at::Tensor two_tasks_loss(const at::Tensor& output, const at::Tensor& target) {
  return (output.to(torch::kFloat) - target).square().mean(0).sum();
}

double Way::seconds_of_epochs(int64_t epochs) const {
  return seconds_of(device, [&] {
    for (int64_t done = 0; done < epochs; ++done) {
      epoch(false);
    }
  });
}

Way articles_loop(std::string name, const TwoTasksData& data, int64_t width, std::optional<c10::ScalarType> autocast) {
  torch::manual_seed(2);
  const auto model = std::make_shared<TwoTasks>(width);
  move_to(**model, data.x.device());
  const auto adam =
      std::make_shared<torch::optim::Adam>((*model)->parameters(), torch::optim::AdamOptions(kTwoTasksRate));
  return {std::move(name),
          [=](bool wants_loss) {
            adam->zero_grad();
            at::Tensor loss;
            {
              std::optional<Autocast> scope;
              if (autocast) {
                scope.emplace(data.x.device().type(), *autocast);
              }
              loss = two_tasks_loss((*model)->forward(data.x), data.y);
            }
            loss.backward();
            adam->step();
            return wants_loss ? loss.item<double>() : 0.0;
          },
          model, data.x.device()};
}

Way stepper_loop(std::string name, const TwoTasksData& data, int64_t width, Precision precision, int64_t micro_batch) {
  torch::manual_seed(2);
  struct State {
    TwoTasks model;
    AdamW adam;
    Stepper stepper;
    State(TwoTasks on_device, Precision precision, int64_t micro_batch)
        : model(std::move(on_device)),
          adam(model->parameters(), {.lr = kTwoTasksRate, .weight_decay = 0}),
          stepper(model, adam, {.precision = precision, .micro_batch = micro_batch}) {}
  };
  TwoTasks model(width);
  move_to(*model, data.x.device());
  const auto state = std::make_shared<State>(std::move(model), precision, micro_batch);
  return {std::move(name),
          [=](bool wants_loss) {
            const StepResult result = state->stepper.step({data.x, data.y}, [&](const Batch& micro) {
              return Loss::mean(two_tasks_loss(state->model->forward(micro[0]), micro[1]), micro.size());
            });
            return wants_loss ? result.loss() : 0.0;
          },
          std::make_shared<TwoTasks>(state->model), data.x.device()};
}

int64_t fastest_micro_batch(const TwoTasksData& data, int64_t width, Precision precision) {
  const int64_t points = data.x.size(0);
  std::vector<int64_t> sizes;
  std::vector<std::function<double()>> programs;
  for (const int64_t parts : {1, 4, 10, 20, 40}) {
    sizes.push_back((points + parts - 1) / parts);
    const Way way = stepper_loop("", data, width, precision, sizes.back());
    programs.emplace_back([way] { return way.seconds_of_epochs(1); });
  }
  constexpr int64_t kRounds = 7;
  const Turns turns = take_turns(programs, kRounds);
  size_t best = 0;
  for (size_t i = 1; i < sizes.size(); ++i) {
    if (turns.ratio(i).median < turns.ratio(best).median) {
      best = i;
    }
  }
  return sizes[best];
}

}  // namespace snug::measure
