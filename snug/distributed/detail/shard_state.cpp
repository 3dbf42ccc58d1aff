#include "snug/distributed/detail/shard_state.h"

#include <algorithm>
#include <sstream>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core/error.h"
#include "snug/optim/detail/state_archive.h"

namespace snug::detail {
namespace {

bool is_whole(const ShardPiece& piece, const at::Tensor& parameter) {
  return piece.begin == 0 && piece.end == parameter.numel();
}

at::Tensor in_shape_of(const at::Tensor& parameter, const std::vector<at::Tensor>& parts) {
  at::Tensor whole = at::empty_strided(parameter.sizes(), parameter.strides(), parts.front().options());
  memory_of(whole, 0, whole.numel()).copy_(at::cat(parts));
  return whole;
}

// Of a tensor that was cut, the parts; counts of steps are the same in each.
StateDict join(const std::vector<const StateDict*>& parts, const at::Tensor& parameter) {
  StateDict result;
  for (const StateEntry& entry : parts.front()->entries()) {
    std::vector<at::Tensor> tensors;
    for (const StateDict* part : parts) {
      tensors.push_back(part->get<at::Tensor>(entry.name));
    }
    result.set(entry.name, tensors.front().dim() == 0 ? tensors.front() : in_shape_of(parameter, tensors));
  }
  return result;
}

StateDict cut(const StateDict& state, const ShardPiece& piece, const at::Tensor& parameter) {
  StateDict result;
  for (const StateEntry& entry : state.entries()) {
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

at::Tensor to_bytes(const StateDict& state) {
  torch::serialize::OutputArchive archive;
  write_state(archive, state);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = stream.str();
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

StateDict from_bytes(const at::Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), bytes.nbytes());
  return read_state(archive);
}

StateDict join_shares(const std::vector<StateDict>& shares, const std::vector<ShardPiece>& pieces,
                      const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> next(shares.size());  // of each rank, the number of its next piece
  std::vector<std::vector<const StateDict*>> parts(parameters.size());
  for (const ShardPiece& piece : pieces) {
    const auto rank = static_cast<size_t>(piece.rank);
    if (const std::string place = std::to_string(next[rank]++); shares[rank].contains(place)) {
      parts[piece.parameter].push_back(&shares[rank].get<StateDict>(place));
    }
  }
  StateDict whole;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].size() == 1) {
      whole.set(std::to_string(i), *parts[i].front());
    } else if (!parts[i].empty()) {
      whole.set(std::to_string(i), join(parts[i], parameters[i]));
    }
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
