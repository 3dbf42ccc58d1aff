#include "snug/stepper.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>

#include "python/src/bind.h"
#include "python/src/python_model.h"
#include "snug/core.h"

namespace snug::python {
namespace {

namespace py = pybind11;

// A Stepper on a model of Python's, with an optimizer of Python's or of snug's.
class PythonStepper {
 public:
  PythonStepper(const py::object& model, const py::object& optimizer, StepperOptions options)
      : model_(std::make_shared<PythonModule>(model)), own_optimizer_(optimizer) {
    if (!py::isinstance<torch::optim::Optimizer>(optimizer)) {
      of_python_ = std::make_unique<PythonOptimizer>(optimizer, options.budget.memory);
    }
    auto& used = of_python_ ? *of_python_ : optimizer.cast<torch::optim::Optimizer&>();
    stepper_.emplace(*model_, used, std::move(options));
    model_->forget_buffers();
  }

  // `loss_of` takes the tensors of a micro-batch.
  StepResult step(std::vector<at::Tensor> batch, py::function loss_of) {
    model_->update();
    const auto forget_buffers = c10::make_scope_exit([&] { model_->forget_buffers(); });
    const Shared<py::function> function(std::move(loss_of));
    const py::gil_scoped_release no_lock;
    return stepper_->step(Batch(std::move(batch)),
                          [&](const Batch& micro) { return with_lock([&] { return loss(micro, *function); }); });
  }

  std::string plan() const {
    const std::optional<StepPlan> plan = stepper_->plan();
    return plan ? plan->explain() : "";
  }

 private:
  static Loss loss(const Batch& micro, const py::function& loss_of) {
    py::tuple arguments(micro.tensors().size());
    for (size_t i = 0; i < micro.tensors().size(); ++i) {
      arguments[i] = py::cast(micro.tensors()[i]);
    }
    const py::object result = loss_of(*arguments);
    if (py::isinstance<Loss>(result)) {
      return result.cast<Loss>();
    }
    if (!THPVariable_Check(result.ptr())) {
      throw ConfigError("Stepper.step: loss_of returned " + py::type::of(result).attr("__name__").cast<std::string>() +
                        "; let it return the mean over the batch as a tensor, or a snug.Loss");
    }
    return Loss::mean(result.cast<at::Tensor>(), micro.size());
  }

  std::shared_ptr<PythonModule> model_;
  py::object own_optimizer_;  // keeps it alive
  std::unique_ptr<PythonOptimizer> of_python_;
  std::optional<Stepper> stepper_;
};

std::unique_ptr<PythonStepper> make_stepper(const py::object& model, const py::object& optimizer,
                                            const py::object& memory, int64_t micro_batch, const std::string& precision,
                                            double clip_norm, bool split_batch_norm,
                                            const std::optional<std::string>& offload, const std::string& plan_folder,
                                            bool plan) {
  StepperOptions options{
      .precision = precision_from_string(precision),
      .micro_batch = micro_batch,
      .clip_norm = clip_norm,
      .budget = {
          .memory = bytes_of(memory), .plan = plan, .plan_folder = plan_folder, .split_batch_norm = split_batch_norm}};
  if (offload) {
    options.budget.offload = *offload;
  }
  return std::make_unique<PythonStepper>(model, optimizer, std::move(options));
}

}  // namespace

void bind_stepper(py::module_& module) {
  py::class_<Loss>(module, "Loss")
      .def_static("sum", [](const at::Tensor& sum, int64_t count) { return Loss::sum(sum, count); })
      .def_static("sum", [](const at::Tensor& sum, const at::Tensor& count) { return Loss::sum(sum, count); })
      .def_static("mean", [](const at::Tensor& mean, int64_t count) { return Loss::mean(mean, count); })
      .def_static("whole", &Loss::whole);
  py::class_<StepResult>(module, "StepResult")
      .def_property_readonly("loss", &StepResult::loss)
      .def_property_readonly("stepped", &StepResult::stepped)
      .def_property_readonly("grad_norm", &StepResult::grad_norm)
      .def_property_readonly("scale", &StepResult::scale)
      .def_readonly("micro_batches", &StepResult::micro_batches)
      .def_readonly("items", &StepResult::items)
      .def_readonly("peak_bytes", &StepResult::peak_bytes)
      .def_readonly("activation_peak_bytes", &StepResult::activation_peak_bytes)
      .def_readonly("seconds", &StepResult::seconds)
      .def_readonly("step_downs", &StepResult::step_downs)
      .def_readonly("plan_deviation", &StepResult::plan_deviation);
  py::class_<PythonStepper>(module, "Stepper")
      .def(py::init(&make_stepper))
      .def("step", &PythonStepper::step)
      .def("plan", &PythonStepper::plan);
}

}  // namespace snug::python
