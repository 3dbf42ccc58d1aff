#include "src/distributed/shard_state.h"

#include <string>
#include <utility>
#include <variant>

#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/distributed/same_model.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;  // in the order of the state

bool is_whole(const ShardPiece& piece, const at::Tensor& parameter) {
  return piece.begin == 0 && piece.end == parameter.numel();
}

// What other ranks must know of a share: dtypes, sizes and strides.
std::string forms_of(const StateDict& share) {
  Json forms = Json::object();
  for (const StateDict::Entry& piece : share.entries()) {
    for (const StateDict::Entry& entry : std::get<StateDict>(piece.value).entries()) {
      const auto& tensor = std::get<at::Tensor>(entry.value);
      forms[piece.name][entry.name] = {{"dtype", static_cast<int>(tensor.scalar_type())},
                                       {"sizes", tensor.sizes().vec()},
                                       {"strides", tensor.strides().vec()}};
    }
  }
  return forms.dump();
}

// A tensor of the form, or like `parameter`, without memory.
at::Tensor without_memory(const Json& form, const at::Tensor* parameter) {
  const auto options = at::TensorOptions(at::kMeta).dtype(static_cast<at::ScalarType>(form["dtype"].get<int>()));
  return parameter != nullptr ? at::empty_strided(parameter->sizes(), parameter->strides(), options)
                              : at::empty_strided(form["sizes"].get<std::vector<int64_t>>(),
                                                  form["strides"].get<std::vector<int64_t>>(), options);
}

StateDict cut(const StateDict& state, const ShardPiece& piece, const at::Tensor& parameter) {
  StateDict result;
  for (const StateDict::Entry& entry : state.entries()) {
    const auto& tensor = state.get<at::Tensor>(entry.name);
    if (tensor.defined() && tensor.dim() > 0) {
      if (tensor.numel() != parameter.numel()) {
        throw CorruptFile(fmt::format(
            "ShardedOptimizer.load_state_dict: {} of parameter {} has shape [{}], the parameter [{}]; was "
            "this state saved for another model?",
            entry.name, piece.parameter, fmt::join(tensor.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
      }
      result.set(entry.name,
                 memory_of(laid_out_like(parameter, tensor.reshape(parameter.sizes())), piece.begin, piece.end));
    } else {
      result.set(entry.name, tensor);
    }
  }
  return result;
}

}  // namespace

at::Tensor memory_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor) {
  if (tensor.strides() == parameter.strides() || (tensor.is_contiguous() && parameter.is_contiguous())) {
    return tensor;
  }
  return at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options()).copy_(tensor);
}

WholeState whole_state(ProcessGroup& group, const StateDict& mine, const std::vector<ShardPiece>& pieces,
                       const std::vector<at::Tensor>& parameters) {
  std::vector<Json> forms;  // of all ranks
  for (const std::string& text : texts_of_all_ranks(group, forms_of(mine))) {
    forms.push_back(Json::parse(text));
  }
  std::vector<size_t> next(forms.size());  // for each rank, the number of the rank's next piece
  WholeState whole;
  for (const ShardPiece& piece : pieces) {
    const auto rank = static_cast<size_t>(piece.rank);
    const std::string place = std::to_string(next[rank]++), number = std::to_string(piece.parameter);
    if (!forms[rank].contains(place)) {
      continue;
    }
    const at::Tensor& parameter = parameters[piece.parameter];
    StateDict joined = whole.state.contains(number) ? whole.state.get<StateDict>(number) : StateDict();
    for (const auto& [name, form] : forms[rank][place].items()) {
      const bool is_part = !form["sizes"].empty() && !is_whole(piece, parameter);
      if (!joined.contains(name)) {
        joined.set(name, without_memory(form, is_part ? &parameter : nullptr));
      } else if (!is_part) {
        continue;  // each piece has the same count of steps
      }
      const auto& tensor = joined.get<at::Tensor>(name);
      const int64_t elements = is_part ? piece.end - piece.begin : tensor.numel();
      whole.parts[tensor.unsafeGetTensorImpl()].push_back(
          {elements * static_cast<int64_t>(tensor.element_size()),
           piece.rank == group.rank() ? mine.get<StateDict>(place).get<at::Tensor>(name) : at::Tensor()});
    }
    whole.state.set(number, std::move(joined));
  }
  return whole;
}

StateDict share_of(const StateDict& whole, const std::vector<std::string>& places, int rank,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters) {
  StateDict share;
  size_t next = 0;
  for (const ShardPiece& piece : pieces) {
    if (piece.rank != rank) {
      continue;
    }
    const std::string name = std::to_string(next++);
    const std::string& place = places[piece.parameter];
    if (whole.contains(place)) {
      const auto& state = whole.get<StateDict>(place);
      const at::Tensor& parameter = parameters[piece.parameter];
      share.set(name, is_whole(piece, parameter) ? state : cut(state, piece, parameter));
    }
  }
  return share;
}

}  // namespace snug::detail
