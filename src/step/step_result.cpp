#include <limits>

#include <ATen/ATen.h>

#include "snug/step_plan.h"

namespace snug {

double StepResult::loss() const {
  return loss_.defined() ? loss_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
bool StepResult::stepped() const { return outcome_; }
double StepResult::grad_norm() const { return grad_norm_.defined() ? grad_norm_.item<double>() : 0.0; }
double StepResult::first_grad_norm() const {
  return first_grad_norm_.defined() ? first_grad_norm_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
double StepResult::scale() const { return scale_.item<double>(); }

}  // namespace snug
