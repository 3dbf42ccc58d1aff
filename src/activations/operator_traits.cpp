#include "src/activations/operator_traits.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include <ATen/core/enum_tag.h>

namespace snug::detail {
namespace {

// Whether the operator is a batch normalisation that moves running statistics in training without a mark in its schema:
// native_batch_norm, the operators of cuDNN and MIOpen, and the parts of synchronised batch normalisation. Other
// operators with arguments of the same names only read running statistics.
bool moves_statistics(const std::string& name) {
  return name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm" || name == "aten::miopen_batch_norm" ||
         name == "aten::batch_norm_update_stats" || name == "aten::batch_norm_gather_stats" ||
         name == "aten::batch_norm_gather_stats_with_counts";
}

// Not batch normalisations: backward passes, and the parts of synchronised batch normalisation, which compute or apply
// gathered statistics.
bool is_batch_norm(const std::string& name) {
  return name.starts_with("aten::") && name.find("batch_norm") != std::string::npos &&
         name.find("backward") == std::string::npos && !name.ends_with("_elemt") && !name.ends_with("_no_update");
}

OperatorTraits read_traits(const c10::OperatorHandle& op) {
  OperatorTraits traits;
  traits.may_normalise = is_batch_norm(op.schema().name());
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (const auto* alias = arguments[i].alias_info(); alias != nullptr && alias->isWrite()) {
      traits.written.push_back(i);
    }
    if (arguments[i].type()->kind() == c10::TypeKind::StreamObjType) {
      traits.stream = static_cast<int>(i);
    }
    const std::string& name = arguments[i].name();
    if (moves_statistics(op.schema().name()) && (name == "running_mean" || name == "running_var")) {
      traits.statistics.push_back(i);
    } else if (name == "training" && traits.may_normalise) {
      traits.training = static_cast<int>(i);
    }
  }
  if (traits.stream >= 0) {
    traits.written.clear();
  }
  traits.is_view = makes_only_views(op.schema());
  const std::string& name = op.schema().name();
  traits.reads_no_values = traits.written.empty() && (name.ends_with("_like") || name.starts_with("aten::new_"));
  traits.is_collective = name.starts_with("c10d") || name.starts_with("_c10d");
  const bool is_torchs_own = name.starts_with("aten::");
  traits.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.has_own_state = name == "aten::_cudnn_rnn" || name == "aten::miopen_rnn";
  const bool may_have_dropout = is_torchs_own && (traits.is_random || traits.has_own_state);
  for (size_t i = 0; may_have_dropout && i < arguments.size(); ++i) {
    const std::string& argument = arguments[i].name();
    if (argument == "dropout_p" || argument == "dropout") {
      traits.dropout = static_cast<int>(i);
    } else if (argument == "train") {
      traits.train = static_cast<int>(i);
    }
  }
  return traits;
}

}  // namespace

bool OperatorTraits::writes(const Arguments& arguments, size_t argument) const {
  return std::ranges::find(written, argument) != written.end() ||
         (is_statistic(argument) && (training < 0 || arguments[static_cast<size_t>(training)].toBool()));
}

bool OperatorTraits::has_dropout(const Arguments& arguments) const {
  const auto says = [&](int argument, const c10::IValue& value) {
    return argument >= 0 && arguments[static_cast<size_t>(argument)] == value;
  };
  return !says(dropout, 0.0) && !says(train, false);
}

bool OperatorTraits::draws(const Arguments& arguments) const { return is_random && has_dropout(arguments); }

bool OperatorTraits::reads_batch_statistics(const Arguments& arguments) const {
  const bool is_training = may_normalise && (training < 0 || arguments[static_cast<size_t>(training)].toBool());
  return is_training && arguments[0].isTensor() && arguments[0].toTensor().dim() > 0 &&
         arguments[0].toTensor().size(0) > 1;
}

bool OperatorTraits::draws_from_own_state(const Arguments& arguments) const {
  return has_own_state && has_dropout(arguments);
}

bool is_workspace(const c10::OperatorHandle& producer, const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::ScalarType::Byte && producer.schema().name().find("_rnn") != std::string::npos;
}

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, OperatorTraits> known;
  const auto found = known.find(op);
  return found != known.end() ? found->second : known.emplace(op, read_traits(op)).first->second;
}

}  // namespace snug::detail
