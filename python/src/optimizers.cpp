#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/optim/adamw.h>

#include "python/src/bind.h"
#include "snug/adamw.h"

namespace snug::python {
namespace {

namespace py = pybind11;

std::unique_ptr<torch::optim::AdamWOptions> options_of(const py::handle& group) {
  const auto betas = group["betas"].cast<std::pair<double, double>>();
  auto options = std::make_unique<torch::optim::AdamWOptions>(group["lr"].cast<double>());
  options->betas({betas.first, betas.second});
  options->eps(group["eps"].cast<double>());
  options->weight_decay(group["weight_decay"].cast<double>());
  return options;
}

std::vector<torch::optim::OptimizerParamGroup> groups_of(const py::list& param_groups) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const py::handle group : param_groups) {
    groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>(), options_of(group));
  }
  return groups;
}

// What a schedule of Python's has changed in param_groups.
void set_options(FusedOptimizer& optimizer, const py::list& param_groups) {
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    optimizer.param_groups()[i].set_options(options_of(param_groups[i]));
  }
}

// Without a window: on the device; without a directory: on the host.
bool keep_state_in(FusedOptimizer& optimizer, const py::object& window, const std::optional<std::string>& directory) {
  StatePlacement place = StateOnDevice();
  if (directory) {
    place = StateFile{.directory = *directory, .window = bytes_of(window)};
  } else if (!window.is_none()) {
    place = StateOnHost{.window = bytes_of(window)};
  }
  const py::gil_scoped_release no_lock;
  return optimizer.keep_state_in(place);
}

std::pair<std::optional<int64_t>, std::optional<std::string>> state_placement(const FusedOptimizer& optimizer) {
  const StatePlacement place = optimizer.state_placement();
  if (const auto* file = std::get_if<StateFile>(&place)) {
    return {file->window.count(), file->directory.string()};
  }
  const auto* host = std::get_if<StateOnHost>(&place);
  return {host == nullptr ? std::nullopt : std::optional(host->window.count()), std::nullopt};
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::class_<torch::optim::Optimizer>(module, "Optimizer");
  py::class_<FusedOptimizer, torch::optim::Optimizer>(module, "FusedOptimizer")
      .def("set_options", &set_options)
      .def("keep_state_in", &keep_state_in)
      .def("state_placement", &state_placement)
      .def(
          "step", [](FusedOptimizer& optimizer) { optimizer.step(); }, py::call_guard<py::gil_scoped_release>())
      .def("state_bytes_to_come", [](const FusedOptimizer& optimizer) { return optimizer.state_bytes_to_come(); })
      .def("state_dict", [](const FusedOptimizer& optimizer) { return to_python(optimizer.state_dict()); })
      .def("load_state_dict",
           [](FusedOptimizer& optimizer, const py::dict& state) { optimizer.load_state_dict(from_python(state)); });
  py::class_<AdamW, FusedOptimizer>(module, "AdamW").def(py::init([](const py::list& param_groups) {
    return std::make_unique<AdamW>(groups_of(param_groups));
  }));
  py::class_<AdamW8bit, FusedOptimizer>(module, "AdamW8bit")
      .def(py::init([](const py::list& param_groups, int64_t min_elements) {
             return std::make_unique<AdamW8bit>(groups_of(param_groups),
                                                AdamW8bitOptions{.min_elements = min_elements});
           }),
           py::arg("param_groups"), py::arg("min_elements"));
}

}  // namespace snug::python
