#include "snug/muon.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/embedding.h>

#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/optim/adam_rules.h"
#include "src/optim/adamw_update.h"

namespace snug {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using TorchAdamW = torch::optim::AdamWOptions;
using detail::check_option;
using detail::is_rate;

// Returns null for a group of AdamW.
const MuonOptions* muon_options(const OptimizerOptions& options) {
  const auto* group = dynamic_cast<const MuonGroup*>(&options);
  return group == nullptr ? nullptr : &group->options;
}

void check_muon(std::string_view name, const OptimizerOptions& options) {
  const MuonOptions* o = muon_options(options);
  if (o == nullptr) {
    detail::check_adam_options<TorchAdamW>(name, options);
    return;
  }
  check_option(name, is_rate(o->lr), "lr", o->lr, "finite and >= 0");
  check_option(name, is_rate(o->weight_decay), "weight_decay", o->weight_decay, "finite and >= 0");
  check_option(name, is_rate(o->momentum), "momentum", o->momentum, "finite and >= 0");
  check_option(name, is_rate(o->eps), "eps", o->eps, "finite and >= 0");
  check_option(name, o->ns_steps >= 0 && o->ns_steps < 100, "ns_steps", static_cast<double>(o->ns_steps), "0 to 99");
  for (const double coefficient : o->ns_coefficients) {
    check_option(name, std::isfinite(coefficient), "ns_coefficients", coefficient, "finite");
  }
}

constexpr const char* kMatchRms = "match_rms_adamw";

StateDict muon_to_state(const OptimizerOptions& options) {
  const MuonOptions* o = muon_options(options);
  if (o == nullptr) {
    return detail::adam_options_to_state<TorchAdamW>(options);
  }
  StateDict state, coefficients;
  for (size_t i = 0; i < o->ns_coefficients.size(); ++i) {
    coefficients.set(std::to_string(i), o->ns_coefficients[i]);
  }
  state.set("lr", o->lr);
  state.set("weight_decay", o->weight_decay);
  state.set("momentum", o->momentum);
  state.set("nesterov", o->nesterov);
  state.set("ns_coefficients", std::move(coefficients));
  state.set("eps", o->eps);
  state.set("ns_steps", o->ns_steps);
  state.set("adjust_lr_fn", std::string(o->match_rms_adamw ? kMatchRms : "original"));
  return state;
}

bool matches_rms(std::string_view name, const StateDict& state) {
  if (!state.contains("adjust_lr_fn")) {
    return false;  // None in Python
  }
  const auto& text = state.get<std::string>("adjust_lr_fn");
  if (text != "original" && text != kMatchRms) {
    throw ConfigError(
        fmt::format("{}.load_state_dict: adjust_lr_fn is '{}' in the state, which this optimizer does "
                    "not offer",
                    name, text));
  }
  return text == kMatchRms;
}

std::unique_ptr<OptimizerOptions> muon_from_state(std::string_view name, const StateDict& state) {
  if (!state.contains("ns_steps")) {
    return detail::adam_options_from_state<TorchAdamW>(name, state);
  }
  MuonOptions o{.lr = detail::number_in(state, "lr"),
                .weight_decay = detail::number_in(state, "weight_decay"),
                .momentum = detail::number_in(state, "momentum"),
                .nesterov = state.get<bool>("nesterov"),
                .eps = detail::number_in(state, "eps"),
                .ns_steps = state.get<int64_t>("ns_steps"),
                .match_rms_adamw = matches_rms(name, state)};
  for (size_t i = 0; i < o.ns_coefficients.size(); ++i) {
    o.ns_coefficients[i] = detail::number_in(state.get<StateDict>("ns_coefficients"), std::to_string(i));
  }
  return std::make_unique<MuonGroup>(o);
}

constexpr detail::OptionRules kMuonRules{"Muon", check_muon, muon_to_state, muon_from_state, /*are_torchs=*/false};

// Memory for the updates of all matrices, one matrix after the other, made before anything is written.
class NewtonSchulz {
 public:
  // The numbers of elements of the largest matrix, and of the largest matrix's product with itself.
  struct Sizes {
    int64_t matrix = 0, gram = 0;

    void include(const at::Tensor& matrix_of) {
      const int64_t side = std::min(matrix_of.size(0), matrix_of.size(1));
      matrix = std::max(matrix, matrix_of.numel());
      gram = std::max(gram, side * side);
    }
    int64_t bytes(int64_t element_bytes, c10::Device device) const {
      constexpr int64_t kLow = 2;
      return detail::allocated_bytes(matrix * element_bytes, device) +
             2 * detail::allocated_bytes(matrix * kLow, device) + 2 * detail::allocated_bytes(gram * kLow, device) +
             detail::allocated_bytes(kLow, device);
    }
  };

  NewtonSchulz(const Sizes& sizes, const at::TensorOptions& options)
      : update_(at::empty({sizes.matrix}, options)),
        now_(at::empty({sizes.matrix}, options.dtype(at::kBFloat16))),
        next_(at::empty_like(now_)),
        gram_(at::empty({sizes.gram}, now_.options())),
        polynomial_(at::empty_like(gram_)),
        norm_(at::empty({}, now_.options())) {}

  // Runs once for each shape. Products of matrices allocate memory of LibTorch's and oneDNN's own, and the addition
  // makes a copy in the parameter's type. If the memory is too small, the error must come before anything is written.
  void rehearse(const std::vector<at::Tensor>& matrices, const MuonOptions& o) {
    std::set<std::pair<std::vector<int64_t>, std::vector<int64_t>>> seen;
    for (const at::Tensor& matrix : matrices) {
      if (seen.emplace(matrix.sizes().vec(), matrix.strides().vec()).second) {
        MuonOptions once = o;
        once.ns_steps = std::min<int64_t>(1, o.ns_steps);
        const at::Tensor scratch = update_of(matrix);
        scratch.add_(orthogonalised(scratch.zero_(), once), 1.0);
      }
    }
  }

  // The tensor for the momentum of a matrix, in the matrix's layout.
  at::Tensor update_of(const at::Tensor& matrix) const { return update_.as_strided(matrix.sizes(), matrix.strides()); }

  // A matrix near the nearest matrix with orthogonal rows or columns. The result lies in this workspace. The operators,
  // and the layouts of the operands, are the same as in torch.optim.Muon, so the bits are the same, too.
  at::Tensor orthogonalised(const at::Tensor& momentum, const MuonOptions& o) {
    const bool is_tall = momentum.size(0) > momentum.size(1);
    at::Tensor x = now_.as_strided(momentum.sizes(), momentum.strides());
    x.copy_(momentum);
    x = is_tall ? x.t() : x;
    at::linalg_vector_norm_out(norm_, x, 2);
    x.div_(norm_.clamp_min_(o.eps));
    const auto [a, b, c] = o.ns_coefficients;
    const int64_t side = x.size(0);
    at::Tensor gram = gram_.narrow(0, 0, side * side).view({side, side});
    at::Tensor polynomial = polynomial_.narrow(0, 0, side * side).view({side, side});
    for (int64_t step = 0; step < o.ns_steps; ++step) {
      at::Tensor next = next_.narrow(0, 0, x.numel()).view({side, x.size(1)});
      at::mm_out(gram, x, x.t());
      at::addmm_out(polynomial, gram, gram, gram, b, c);
      at::addmm_out(next, x, polynomial, x, a);
      x = next;
      std::swap(now_, next_);
    }
    return is_tall ? x.t() : x;
  }

 private:
  at::Tensor update_, now_, next_, gram_, polynomial_, norm_;
};

double adjusted_lr(const MuonOptions& o, const at::Tensor& matrix) {
  const auto rows = static_cast<double>(matrix.size(0)), columns = static_cast<double>(matrix.size(1));
  return o.lr *
         (o.match_rms_adamw ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns)));
}

}  // namespace

Muon::Muon(std::vector<at::Tensor> matrices, MuonOptions options)
    : Muon(std::vector{OptimizerParamGroup(without_repeats(std::move(matrices)))}, options) {}

Muon::Muon(const std::vector<OptimizerParamGroup>& groups, MuonOptions options)
    : FusedOptimizer(groups, std::make_unique<MuonGroup>(options), kMuonRules) {
  finish_construction(groups);
}

void Muon::check_in_group(const at::Tensor& parameter, const OptimizerOptions& options) const {
  if (muon_options(options) != nullptr && parameter.dim() != 2) {
    throw ConfigError(
        fmt::format("Muon: {} has {} dimensions, and Muon is for matrices; give it to AdamW (Muon::groups "
                    "divides a model's parameters)",
                    describe(parameter), parameter.dim()));
  }
}

void Muon::make_state(ParameterState& state, const at::Tensor& parameter, const OptimizerOptions& options) const {
  if (muon_options(options) == nullptr) {
    detail::add_adam_state(state, parameter);
  } else {
    state.tensors.emplace_back("momentum_buffer", at::zeros_like(parameter, at::MemoryFormat::Preserve));
  }
}

int64_t Muon::workspace_bytes() const {
  int64_t bytes = 0;
  for (const OptimizerParamGroup& group : param_groups()) {
    std::map<std::pair<std::string, at::ScalarType>, NewtonSchulz::Sizes> by_kind;
    if (muon_options(group.options()) != nullptr) {
      for (const at::Tensor& matrix : group.params()) {
        by_kind[{matrix.device().str(), matrix.scalar_type()}].include(matrix);
      }
    }
    for (const auto& [kind, sizes] : by_kind) {
      bytes += sizes.bytes(static_cast<int64_t>(c10::elementSize(kind.second)), c10::Device(kind.first));
    }
  }
  return bytes;
}

std::function<void()> Muon::prepare(const Work& work) const {
  const MuonOptions* o = muon_options(*work.options);
  if (o == nullptr) {
    const detail::UpdateCounts steps(work.states_named("step"), work.found_inf);
    return detail::and_count(detail::prepare_fused_adam<TorchAdamW>(work, steps.counted), work, steps);
  }
  // The same arithmetic as in GradScaler's unscaling.
  const at::Tensor inverse_scale =
      work.grad_scale.defined() ? work.grad_scale.to(at::kDouble).reciprocal().to(at::kFloat) : at::Tensor();
  const auto unscale = [inverse_scale](const at::Tensor& gradient) {
    if (inverse_scale.defined()) {
      gradient.mul_(inverse_scale);
    }
  };
  if (work.found_inf.defined() && work.found_inf.item<float>() != 0) {
    return [unscale, gradients = work.gradients] { std::for_each(gradients.begin(), gradients.end(), unscale); };
  }
  NewtonSchulz::Sizes sizes;
  for (const at::Tensor& matrix : work.parameters) {
    sizes.include(matrix);
  }
  NewtonSchulz newton_schulz(sizes, work.parameters.front().options().requires_grad(false));
  newton_schulz.rehearse(work.parameters, *o);
  // The scalar tensor that an operator makes of the number.
  const at::Tensor decay = at::scalar_tensor(1 - o->lr * o->weight_decay, at::kDouble);
  return [work, o, newton_schulz, unscale, decay, buffers = work.states_named("momentum_buffer")]() mutable {
    for (size_t i = 0; i < work.parameters.size(); ++i) {
      const at::Tensor &matrix = work.parameters[i], &gradient = work.gradients[i], &buffer = buffers[i];
      unscale(gradient);
      buffer.lerp_(gradient, 1 - o->momentum);
      at::Tensor momentum = buffer;
      if (o->nesterov) {
        momentum = newton_schulz.update_of(matrix);
        at::lerp_out(momentum, gradient, buffer, o->momentum);
      }
      const at::Tensor update = newton_schulz.orthogonalised(momentum, *o);
      matrix.mul_(decay);
      matrix.add_(update, -adjusted_lr(*o, matrix));
    }
  };
}

std::vector<OptimizerParamGroup> Muon::groups(
    const torch::nn::Module& module, MuonOptions muon, AdamWOptions adamw,
    const std::function<bool(const std::string& name, const at::Tensor& parameter)>& by_adamw) {
  if (adamw.master_weights || adamw.stochastic_rounding) {
    throw ConfigError("Muon.groups: master_weights and stochastic_rounding are of AdamW alone; leave them out");
  }
  std::unordered_set<const void*> embeddings, seen;
  for (const auto& part : module.modules()) {
    if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(part.get())) {
      embeddings.insert(embedding->weight.unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> matrices, others;
  for (const auto& named : module.named_parameters()) {
    const at::Tensor& parameter = named.value();
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    const bool is_other = parameter.dim() != 2 || embeddings.count(parameter.unsafeGetTensorImpl()) > 0 ||
                          (by_adamw && by_adamw(named.key(), parameter));
    (is_other ? others : matrices).push_back(parameter);
  }
  if (matrices.empty()) {
    throw ConfigError("Muon.groups: the module has no trained matrices for Muon; use AdamW");
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::make_unique<MuonGroup>(muon));
  if (!others.empty()) {
    groups.emplace_back(std::move(others), detail::to_adam_options<TorchAdamW>(adamw));
  }
  return groups;
}

}  // namespace snug
