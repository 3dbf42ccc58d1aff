#include "snug/extra/ema.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

constexpr const char* kUpdates = "updates";
constexpr const char* kAverages = "averages";

using detail::is_low;
using Tensors = std::vector<at::Tensor>;

bool can_be_averaged(const at::Tensor& p) {
  return p.defined() && (is_low(p) || p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble);
}

// A tensor like each average, without values. All scratch tensors of one type and device share the memory of the
// largest.
Tensors scratch_like(Tensors averages) {
  Tensors sorted = averages, shared;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.numel() > b.numel(); });
  const auto find = [&](const at::Tensor& like) {
    return std::find_if(shared.begin(), shared.end(), [&](const at::Tensor& flat) {
      return flat.scalar_type() == like.scalar_type() && flat.device() == like.device();
    });
  };
  for (const at::Tensor& average : sorted) {
    if (find(average) == shared.end()) {
      shared.push_back(at::empty({average.numel()}, average.options()));
    }
  }
  for (at::Tensor& average : averages) {
    average = find(average)->as_strided(average.sizes(), average.strides());
  }
  return averages;
}

}  // namespace

Ema::Ema(std::vector<at::Tensor> parameters, EmaOptions options)
    : options_(options), parameters_(std::move(parameters)) {
  if (!(options_.decay >= 0 && options_.decay <= 1)) {
    throw ConfigError(fmt::format("Ema: decay is {}; give a number from 0 to 1, such as 0.999", options_.decay));
  }
  std::unordered_set<const void*> seen;
  std::erase_if(parameters_, [&](const at::Tensor& p) { return !seen.insert(p.unsafeGetTensorImpl()).second; });
  if (parameters_.empty()) {
    throw ConfigError("Ema: there are no parameters; was the model built before?");
  }
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters_) {
    if (!can_be_averaged(p)) {
      throw ConfigError(fmt::format("Ema: parameter {} is {}; only FP16, BF16, FP32 and FP64 can be averaged",
                                    averages_.size(), p.defined() ? c10::toString(p.scalar_type()) : "undefined"));
    }
    const auto type = is_low(p) ? at::kFloat : p.scalar_type();
    averages_.push_back(at::empty_like(p, p.options().dtype(type), at::MemoryFormat::Preserve).copy_(p));
  }
}

// The averages of 16-bit parameters, or of the other parameters.
std::vector<at::Tensor> Ema::averages_of(bool low) const {
  Tensors found;
  for (size_t i = 0; i < averages_.size(); ++i) {
    if (is_low(parameters_[i]) == low) {
      found.push_back(averages_[i]);
    }
  }
  return found;
}

void Ema::refuse_in_scope(const char* what) const {
  if (in_scope_) {
    throw ConfigError(fmt::format("Ema.{}: the model holds the averages now; end the Ema::Scope first", what));
  }
}

void Ema::update() {
  refuse_in_scope("update");
  const auto n = static_cast<double>(updates_);
  const double decay = options_.warm_up ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
  const at::NoGradGuard no_grad;
  const Tensors scratch = scratch_like(averages_of(/*low=*/true));  // nothing is allocated after the first write
  auto wide = scratch.begin();
  for (size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor now = is_low(parameters_[i]) ? (wide++)->copy_(parameters_[i]) : parameters_[i].detach();
    if (updates_ == 0) {
      averages_[i].copy_(now);
    } else {
      averages_[i].lerp_(now, 1 - decay);
    }
  }
  ++updates_;
}

StateDict Ema::state_dict() const {
  refuse_in_scope("state_dict");
  StateDict averages, state;
  for (size_t i = 0; i < averages_.size(); ++i) {
    averages.set(std::to_string(i), averages_[i]);
  }
  state.set(kUpdates, updates_);
  state.set(kAverages, std::move(averages));
  return state;
}

void Ema::load_state_dict(const StateDict& state) {
  refuse_in_scope("load_state_dict");
  const int64_t updates = state.get<int64_t>(kUpdates);
  const auto& saved = state.get<StateDict>(kAverages);
  if (updates < 0 || saved.size() != averages_.size()) {
    throw CorruptFile(
        fmt::format("Ema.load_state_dict: {} averages after {} updates were saved; the model has {} parameters",
                    saved.size(), updates, averages_.size()));
  }
  Tensors from;
  for (size_t i = 0; i < averages_.size(); ++i) {
    from.push_back(saved.get<at::Tensor>(std::to_string(i)));
    if (from[i].sizes() != averages_[i].sizes() || from[i].scalar_type() != averages_[i].scalar_type()) {
      throw CorruptFile(
          fmt::format("Ema.load_state_dict: average {} is {} of {} numbers; the model needs {} of {} in the same shape",
                      i, c10::toString(from[i].scalar_type()), from[i].numel(),
                      c10::toString(averages_[i].scalar_type()), averages_[i].numel()));
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < averages_.size(); ++i) {
    averages_[i].copy_(from[i]);
  }
  updates_ = updates;
}

Ema::Scope::Scope(Ema& ema) : ema_(ema) {
  ema.refuse_in_scope("Scope");
  const at::NoGradGuard no_grad;
  const Tensors scratch = scratch_like(ema.averages_of(/*low=*/false));
  auto wide = scratch.begin();
  for (const at::Tensor& parameter : ema.parameters_) {
    kept_.push_back(is_low(parameter) ? parameter.detach().clone() : *wide++);
  }
  exchange();
}

Ema::Scope::~Scope() { exchange(); }

void Ema::Scope::exchange() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) {
    const at::Tensor &parameter = ema_.parameters_[i], &average = ema_.averages_[i];
    if (is_low(parameter)) {
      parameter.copy_(ema_.in_scope_ ? kept_[i] : average);
      continue;
    }
    kept_[i].copy_(parameter);
    parameter.copy_(average);
    average.copy_(kept_[i]);
  }
  ema_.in_scope_ = !ema_.in_scope_;
  Autocast::clear_cache();
}

}  // namespace snug
