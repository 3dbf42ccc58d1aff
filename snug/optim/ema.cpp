#include "snug/optim/ema.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/precision/autocast.h"
#include "snug/precision/detail/low_precision.h"

namespace snug {
namespace {

constexpr const char* kUpdates = "updates";
constexpr const char* kAverages = "averages";
constexpr int64_t kWidenedNumbers = int64_t{4} << 20;  // 16 MiB in FP32

using detail::is_low;

bool is_wide(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
}

at::Tensor average_of(const at::Tensor& parameter) {
  const auto options = parameter.options().dtype(is_low(parameter) ? at::kFloat : parameter.scalar_type());
  return at::empty_like(parameter, options, at::MemoryFormat::Preserve).copy_(parameter);
}

// Parameters that an update takes in together: from the last part's end to this one's, with so many 16-bit numbers.
struct Part {
  size_t end = 0;
  int64_t low_numbers = 0;
};

std::vector<Part> parts_of(const std::vector<at::Tensor>& parameters) {
  std::vector<Part> parts(1);
  for (const at::Tensor& parameter : parameters) {
    if (parts.back().low_numbers > kWidenedNumbers) {
      parts.push_back({.end = parts.back().end});
    }
    ++parts.back().end;
    parts.back().low_numbers += is_low(parameter) ? parameter.numel() : 0;
  }
  return parts;
}

// Room for the widened numbers of one part, on each device that has any.
std::vector<at::Tensor> room_for(const std::vector<Part>& parts, const std::vector<at::Tensor>& parameters) {
  int64_t most = 0;
  for (const Part& part : parts) {
    most = std::max(most, part.low_numbers);
  }
  std::vector<at::Tensor> room;
  for (const at::Tensor& parameter : parameters) {
    const auto is_there = [&](const at::Tensor& flat) { return flat.device() == parameter.device(); };
    if (is_low(parameter) && std::none_of(room.begin(), room.end(), is_there)) {
      room.push_back(at::empty({most}, parameter.options().dtype(at::kFloat)));
    }
  }
  return room;
}

// `parameter` in FP32, written into `room` from `begin` on, in the layout of its average.
at::Tensor widened(const at::Tensor& parameter, const at::Tensor& average, const std::vector<at::Tensor>& room,
                   int64_t begin) {
  const auto flat =
      std::find_if(room.begin(), room.end(), [&](const at::Tensor& t) { return t.device() == parameter.device(); });
  return flat->as_strided(average.sizes(), average.strides(), begin).copy_(parameter);
}

// The part of `scratch` that has a parameter's size.
at::Tensor scratch_like(const std::vector<at::Tensor>& scratch, const at::Tensor& parameter) {
  for (const at::Tensor& flat : scratch) {
    if (flat.scalar_type() == parameter.scalar_type() && flat.device() == parameter.device()) {
      return flat.narrow(0, 0, parameter.numel()).view(parameter.sizes());
    }
  }
  throw Error("Ema: no scratch of this type");  // not reached: the constructor made one for every parameter
}

void reserve(std::vector<at::Tensor>& scratch, const at::Tensor& parameter) {
  for (at::Tensor& flat : scratch) {
    if (flat.scalar_type() == parameter.scalar_type() && flat.device() == parameter.device()) {
      if (flat.numel() < parameter.numel()) {
        flat = at::Tensor();  // first free the smaller one
        flat = at::empty({parameter.numel()}, parameter.options());
      }
      return;
    }
  }
  scratch.push_back(at::empty({parameter.numel()}, parameter.options()));
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
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].defined() || !(is_low(parameters_[i]) || is_wide(parameters_[i]))) {
      throw ConfigError(
          fmt::format("Ema: parameter {} is {}; only FP16, BF16, FP32 and FP64 can be averaged", i,
                      parameters_[i].defined() ? c10::toString(parameters_[i].scalar_type()) : "undefined"));
    }
    averages_.push_back(average_of(parameters_[i]));
  }
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
  const std::vector<Part> parts = parts_of(parameters_);
  const std::vector<at::Tensor> room = room_for(parts, parameters_);  // nothing is asked for after the first write
  size_t i = 0;
  for (const Part& part : parts) {
    std::vector<at::Tensor> averages, now;
    for (int64_t begin = 0; i < part.end; ++i) {
      averages.push_back(averages_[i]);
      now.push_back(parameters_[i].detach());
      if (is_low(parameters_[i])) {
        now.back() = widened(now.back(), averages_[i], room, begin);
        begin += parameters_[i].numel();
      }
    }
    if (updates_ == 0) {
      at::_foreach_copy_(averages, now);
    } else {
      at::_foreach_lerp_(averages, now, 1 - decay);
    }
  }
  ++updates_;
}

StateDict Ema::state_dict() const {
  refuse_in_scope("state_dict");
  StateDict averages;
  for (size_t i = 0; i < averages_.size(); ++i) {
    averages.set(std::to_string(i), averages_[i]);
  }
  StateDict state;
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
  std::vector<at::Tensor> from;
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
  for (const at::Tensor& parameter : ema.parameters_) {
    kept_.push_back(is_low(parameter) ? parameter.detach().clone() : at::Tensor());
    if (!is_low(parameter)) {
      reserve(scratch_, parameter);
    }
  }
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (kept_[i].defined()) {
      ema.parameters_[i].copy_(ema.averages_[i]);
    } else {
      exchange(ema.parameters_[i], ema.averages_[i]);
    }
  }
  ema.in_scope_ = true;
  clear_autocast_cache();
}

Ema::Scope::~Scope() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (kept_[i].defined()) {
      ema_.parameters_[i].copy_(kept_[i]);
    } else {
      exchange(ema_.parameters_[i], ema_.averages_[i]);
    }
  }
  ema_.in_scope_ = false;
  clear_autocast_cache();
}

void Ema::Scope::exchange(const at::Tensor& parameter, const at::Tensor& average) {
  const at::Tensor scratch = scratch_like(scratch_, parameter);
  scratch.copy_(parameter);
  parameter.copy_(average);
  average.copy_(scratch);
}

}  // namespace snug
