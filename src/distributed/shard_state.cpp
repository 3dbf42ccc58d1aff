#include "src/distributed/shard_state.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/distributed/process_group_impl.h"
#include "src/optim/state_archive.h"

namespace snug::detail {
namespace {

bool is_whole(const ShardPiece& piece, const at::Tensor& parameter) {
  return piece.begin == 0 && piece.end == parameter.numel();
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

// A tensor without its bytes, as numbers: dtype, sizes, strides.
at::Tensor form_of(const at::Tensor& tensor) {
  std::vector<int64_t> numbers = {static_cast<int64_t>(tensor.scalar_type())};
  numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
  return at::tensor(numbers, at::kLong);
}

struct Form {
  at::ScalarType dtype;
  at::IntArrayRef sizes, strides;  // parts of the numbers of form_of()
  int64_t elements;

  explicit Form(const at::Tensor& numbers) {
    const at::IntArrayRef all(numbers.const_data_ptr<int64_t>(), static_cast<size_t>(numbers.numel()));
    const size_t dims = (all.size() - 1) / 2;
    dtype = static_cast<at::ScalarType>(all[0]);
    sizes = all.slice(1, dims);
    strides = all.slice(1 + dims);
    elements = c10::multiply_integers(sizes);
  }
};

StateDict forms_of(const StateDict& share) {
  StateDict forms;
  for (const StateDict::Entry& piece : share.entries()) {
    StateDict of_piece;
    for (const StateDict::Entry& entry : std::get<StateDict>(piece.value).entries()) {
      of_piece.set(entry.name, form_of(std::get<at::Tensor>(entry.value)));
    }
    forms.set(piece.name, std::move(of_piece));
  }
  return forms;
}

// Returns the shares of all ranks.
std::vector<StateDict> exchange(ProcessGroup& group, const StateDict& mine) {
  const at::Tensor here = to_bytes(mine);
  const at::Tensor sizes = group.all_gather(at::full({}, here.numel(), at::kLong));
  std::vector<StateDict> all;
  for (int rank = 0; rank < group.size(); ++rank) {
    const at::Tensor bytes = rank == group.rank() ? here : at::empty({sizes[rank].item<int64_t>()}, at::kByte);
    group.broadcast({bytes}, rank);
    all.push_back(from_bytes(bytes));
  }
  return all;
}

at::Tensor bytes_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return memory_of(tensor, begin, end).view(at::kByte);
}

// The bytes of `elements` go to rank `to`.
void send(ProcessGroup& group, int to, const KeptElements& elements) {
  constexpr int64_t kAtOnce = int64_t{1} << 20;
  const int64_t bytes = (elements.end - elements.begin) * static_cast<int64_t>(elements.tensor.element_size());
  const bool is_sender = elements.rank == group.rank(), is_receiver = to == group.rank();
  const at::Tensor source = is_sender ? bytes_of(elements.values, 0, elements.values.numel()) : at::Tensor();
  const at::Tensor target = is_receiver ? bytes_of(elements.tensor, elements.begin, elements.end) : at::Tensor();
  for (int64_t begin = 0; begin < bytes; begin += kAtOnce) {
    const int64_t size = std::min(kAtOnce, bytes - begin);
    const at::Tensor slice = is_sender ? source.narrow(0, begin, size).to(at::kCPU) : at::empty({size}, at::kByte);
    if (elements.rank != to) {
      group.broadcast({slice}, elements.rank);
    }
    if (is_receiver) {
      target.narrow(0, begin, size).copy_(slice);
    }
  }
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

WholeState lay_out(int here, bool is_allocated, const StateDict& mine, const std::vector<StateDict>& forms,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters) {
  const at::TensorOptions options(is_allocated ? at::kCPU : at::kMeta);
  std::vector<size_t> next(forms.size());  // for each rank, the number of the rank's next piece
  WholeState whole;
  for (const ShardPiece& piece : pieces) {
    const auto rank = static_cast<size_t>(piece.rank);
    const std::string place = std::to_string(next[rank]++);
    if (!forms[rank].contains(place)) {
      continue;
    }
    const at::Tensor& parameter = parameters[piece.parameter];
    const std::string number = std::to_string(piece.parameter);
    StateDict joined = whole.state.contains(number) ? whole.state.get<StateDict>(number) : StateDict();
    for (const StateDict::Entry& entry : forms[rank].get<StateDict>(place).entries()) {
      const Form form(std::get<at::Tensor>(entry.value));
      const bool is_part = !form.sizes.empty() && !is_whole(piece, parameter);
      if (!joined.contains(entry.name)) {
        joined.set(entry.name,
                   is_part ? at::empty_strided(parameter.sizes(), parameter.strides(), options.dtype(form.dtype))
                           : at::empty_strided(form.sizes, form.strides, options.dtype(form.dtype)));
      } else if (!is_part) {
        continue;  // each piece has the same count of steps
      }
      whole.elements.push_back(
          {.rank = piece.rank,
           .tensor = joined.get<at::Tensor>(entry.name),
           .begin = is_part ? piece.begin : 0,
           .end = is_part ? piece.end : form.elements,
           .values = piece.rank == here ? mine.get<StateDict>(place).get<at::Tensor>(entry.name) : at::Tensor()});
    }
    whole.state.set(number, std::move(joined));
  }
  return whole;
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

// A rank without room must not leave the other ranks waiting in an exchange.
WholeState whole_state(ProcessGroup& group, int to, const StateDict& mine, const std::vector<ShardPiece>& pieces,
                       const std::vector<at::Tensor>& parameters) {
  const std::vector<StateDict> forms = exchange(group, forms_of(mine));
  WholeState whole;
  std::exception_ptr error;
  try {
    whole = lay_out(group.rank(), group.rank() == to, mine, forms, pieces, parameters);
  } catch (...) {
    error = std::current_exception();
  }
  if (has_another_failed(group, error)) {
    throw Error(
        "ShardedOptimizer: another rank has no room for the state of all ranks; its own message is on its standard "
        "error");
  }
  return whole;
}

void gather_elements(ProcessGroup& group, int to, const WholeState& whole) {
  for (const KeptElements& elements : whole.elements) {
    send(group, to, elements);
  }
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
