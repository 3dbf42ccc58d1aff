#include "src/optim/adamw_update.h"

#include <ATen/ATen.h>

namespace snug::detail {

at::Tensor step_count_for(const at::Tensor& parameter) { return at::zeros({}, parameter.options().dtype(at::kFloat)); }

StepCounts::StepCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf)
    : counted(at::_foreach_add(now, 1)),
      after(found_inf.defined() ? at::_foreach_sub(counted, std::vector<at::Tensor>(counted.size(), found_inf))
                                : counted) {}

}  // namespace snug::detail
