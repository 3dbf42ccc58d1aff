#include <memory>
#include <utility>
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

std::unique_ptr<AdamW8bit> make_adamw8bit(const py::list& param_groups, int64_t min_elements) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const py::handle group : param_groups) {
    groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>(), options_of(group));
  }
  return std::make_unique<AdamW8bit>(groups, AdamW8bitOptions{.min_elements = min_elements});
}

// What a schedule of Python's has changed in param_groups.
void set_options(AdamW8bit& optimizer, const py::list& param_groups) {
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    optimizer.param_groups()[i].set_options(options_of(param_groups[i]));
  }
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::class_<torch::optim::Optimizer>(module, "Optimizer");
  py::class_<AdamW8bit, torch::optim::Optimizer>(module, "AdamW8bit")
      .def(py::init(&make_adamw8bit))
      .def("set_options", &set_options)
      .def(
          "step", [](AdamW8bit& optimizer) { optimizer.step(); }, py::call_guard<py::gil_scoped_release>())
      .def("state_bytes_to_come", [](const AdamW8bit& optimizer) { return optimizer.state_bytes_to_come(); })
      .def("state_dict", [](const AdamW8bit& optimizer) { return to_python(optimizer.state_dict()); })
      .def("load_state_dict",
           [](AdamW8bit& optimizer, const py::dict& state) { optimizer.load_state_dict(from_python(state)); });
}

}  // namespace snug::python
