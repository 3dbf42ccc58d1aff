#include "src/optim/state_outside.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/host_memory.h"
#include "src/memory/weight_window.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

constexpr int64_t kAlignment = 64;  // of tensors in the window and in the file

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct FileSpan {
  int64_t begin, end;  // elements of a state tensor
};

// The part of a state tensor that belongs to some elements of the parameter. The tensor has an element for each element
// of the parameter, or for each `multiple` elements.
FileSpan span_of(const at::Tensor& tensor, int64_t of_parameter, int64_t multiple, int64_t begin, int64_t end) {
  if (begin == 0 && end == of_parameter) {
    return {0, tensor.numel()};
  }
  const int64_t each = tensor.numel() == of_parameter ? 1 : multiple;
  return {begin / each, (end + each - 1) / each};
}

int64_t pieces_in(int64_t elements, int64_t piece) {
  return std::max<int64_t>(1, (elements + piece - 1) / std::max<int64_t>(1, piece));
}

size_t number_of(int64_t begin, int64_t piece) { return static_cast<size_t>(begin / std::max<int64_t>(1, piece)); }

// Some elements in the order of memory. For all elements of a contiguous tensor, the result is the tensor itself.
at::Tensor elements_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  const bool is_whole = begin == 0 && end == tensor.numel() && tensor.is_contiguous();
  return is_whole ? tensor : tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

// Makes `call`, which allocates memory of the host.
template <class Call>
auto on_host(bool is_for_device, const Call& call) {
  return is_for_device ? detail::in_host_memory(
                             "keep_state_in", "the optimizer's state and its window",
                             "give a smaller window, give a StateFile, or leave a Stepper's `offload` out", call)
                       : call();
}

Bytes window_of(const StatePlacement& place) {
  const auto* const file = std::get_if<StateFile>(&place);
  return file != nullptr ? file->window : std::get<StateOnHost>(place).window;
}

void check(const std::string& failure) {
  if (!failure.empty()) {
    throw Error(fmt::format("keep_state_in: {}; give a directory on another disk", failure));
  }
}

}  // namespace

void detail::check_window(std::string_view optimizer, const StatePlacement& place) {
  constexpr int64_t kSmallest = int64_t{192} << 10;
  if (std::holds_alternative<StateOnDevice>(place)) {
    return;
  }
  if (const Bytes window = window_of(place); window.count() < kSmallest || window.is_unlimited()) {
    throw ConfigError(fmt::format("{}.keep_state_in: window is {}; give at least {}, and an amount", optimizer,
                                  window.str(), Bytes(kSmallest).str()));
  }
}

// Elements begin to end - 1 of a parameter of a Work.
struct FusedOptimizer::StateOutside::Piece {
  size_t parameter;
  int64_t begin, end;
};

struct FusedOptimizer::StateOutside::Block {
  const Work* work;
  bool is_late;
  std::vector<Piece> pieces;
  int64_t bytes;
};

// The copies of a block between a device and the window. `in`: gradients and parameters, before the block's update.
// `out`: new values. All copies run in the order of the device's current stream. `at_home`: parameters that are updated
// at home, and must be there.
class FusedOptimizer::StateOutside::DeviceCopies {
 public:
  std::vector<std::pair<at::Tensor, at::Tensor>> in, out;  // to, from
  std::vector<at::Tensor> at_home;

  void begin() {
    std::ranges::for_each(at_home, detail::values_at_home);
    make(in);
  }
  void wait() {
    if (done_) {
      done_->synchronize();
    }
  }
  void end() { make(out); }

 private:
  void make(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
    if (copies.empty()) {
      return;
    }
    for (const auto& [to, from] : copies) {
      to.copy_(from, /*non_blocking=*/true);
    }
    const auto& [to, from] = copies.front();
    const c10::Device device = to.is_cpu() ? from.device() : to.device();
    done_.emplace(device.type()).record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  std::optional<c10::Event> done_;  // the last of the copies that were begun
};

FusedOptimizer::StateOutside::StateOutside(const StatePlacement& place, int64_t multiple, detail::SpillCalls& calls)
    : placement_(place), cut_(place, multiple), calls_(calls) {
  if (const auto* file = std::get_if<StateFile>(&placement_)) {
    disk_.emplace(file->directory, calls);
  }
}

// --- cutting of states

FusedOptimizer::StateOutside::Cut::Cut(const StatePlacement& place, int64_t state_multiple)
    : slot_bytes(window_of(place).count() / static_cast<int64_t>(detail::StateStream::kInMemory)),
      multiple(state_multiple),
      has_file(std::holds_alternative<StateFile>(place)) {}

int64_t FusedOptimizer::StateOutside::Cut::bytes_of(const ParameterState& state, int64_t begin, int64_t end) const {
  const int64_t of_parameter = aligned((end - begin) * static_cast<int64_t>(state.made_for.element_size()));
  int64_t bytes = state.device.is_cpu() ? 0 : 2 * of_parameter;
  for (const auto& [name, tensor] : state.tensors) {
    if (has_file && tensor.dim() > 0) {
      const FileSpan span = span_of(tensor, state.made_for.numel(), multiple, begin, end);
      bytes += aligned((span.end - span.begin) * static_cast<int64_t>(tensor.element_size()));
    }
  }
  return bytes;
}

// The largest number of elements, a multiple of `multiple`, whose state fits into a part of the window.
int64_t FusedOptimizer::StateOutside::Cut::piece_of(const ParameterState& state) const {
  const int64_t all = state.made_for.numel();
  if (multiple == 0 || bytes_of(state, 0, all) <= slot_bytes) {
    return all;
  }
  int64_t low = 1, high = (all + multiple - 1) / multiple;  // in multiples: the largest that fits is in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (bytes_of(state, 0, middle * multiple) <= slot_bytes ? low : high) = middle;
  }
  return low * multiple;
}

// --- the file

void FusedOptimizer::StateOutside::place(ParameterState& state) {
  int64_t end = end_;
  std::map<std::string_view, ParameterState::InFile> placed;
  const int64_t piece = state.in_file.empty() ? cut_.piece_of(state) : state.piece;
  for (const auto& [name, tensor] : state.tensors) {
    if (disk_ && tensor.is_meta() && tensor.dim() > 0 && !state.in_file.contains(name)) {
      placed[name] = {
          .offset = end,
          .sums = std::vector<std::optional<uint64_t>>(static_cast<size_t>(pieces_in(state.made_for.numel(), piece)))};
      end += aligned(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  if (disk_) {
    check(disk_->reserve(end - end_, end_));
  }
  for (auto& [name, tensor] : state.tensors) {
    if (tensor.is_meta() && !(disk_ && tensor.dim() > 0)) {
      tensor = on_host(!state.device.is_cpu(), [&one = tensor] {
        return at::empty_strided(one.sizes(), one.strides(), one.options().device(at::kCPU)).zero_();
      });
    }
  }
  state.piece = piece;
  state.in_file.merge(placed);
  end_ = end;
}

void FusedOptimizer::StateOutside::write(ParameterState& state, std::string_view name, const at::Tensor& value) {
  const at::Tensor& like = state.at(name);
  if (!state.in_file.contains(name)) {
    like.copy_(value);
    return;
  }
  const bool is_laid_out =
      value.is_cpu() && (value.strides() == like.strides() || (value.is_contiguous() && like.is_contiguous()));
  const auto laid_out = [&] {
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU));
  };
  const at::Tensor from = is_laid_out ? value : on_host(!state.device.is_cpu(), laid_out).copy_(value);
  ParameterState::InFile& place = state.in_file.at(name);
  const int64_t all = state.made_for.numel(), bytes = static_cast<int64_t>(like.element_size());
  for (size_t i = 0; i < place.sums.size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * state.piece;
    const FileSpan span = span_of(like, all, cut_.multiple, begin, std::min(begin + state.piece, all));
    const at::Tensor part = elements_of(from, span.begin, span.end).to(like.scalar_type());
    uint64_t sum = 0;
    check(disk_->write(part.const_data_ptr(), (span.end - span.begin) * bytes, place.offset + span.begin * bytes, sum));
    place.sums[i] = sum;
  }
}

at::Tensor FusedOptimizer::StateOutside::read(const ParameterState& state, std::string_view name) {
  const at::Tensor& like = state.at(name);
  if (!state.in_file.contains(name)) {
    return like;
  }
  at::Tensor result = on_host(!state.device.is_cpu(), [&] {
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU));
  });
  const ParameterState::InFile& place = state.in_file.at(name);
  const int64_t all = state.made_for.numel(), bytes = static_cast<int64_t>(like.element_size());
  for (size_t i = 0; i < place.sums.size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * state.piece;
    const FileSpan span = span_of(like, all, cut_.multiple, begin, std::min(begin + state.piece, all));
    at::Tensor part = elements_of(result, span.begin, span.end);
    if (place.sums[i]) {
      check(disk_->read(part.mutable_data_ptr(), (span.end - span.begin) * bytes, place.offset + span.begin * bytes,
                        *place.sums[i]));
    } else {
      part.zero_();
    }
  }
  return result;
}

at::Tensor FusedOptimizer::StateOutside::lent(const ParameterState& state, std::string_view name,
                                              const std::shared_ptr<detail::FileMemory>& memory) {
  const at::Tensor& like = state.at(name);
  const auto place = state.in_file.find(name);
  return place == state.in_file.end()
             ? like
             : detail::tensor_in(memory, place->second.offset, like.sizes(), like.strides(), like.scalar_type());
}

// --- the update

// Small parameters that are updated now share a block, and their blocks come first. An update may come late if the
// update uses nothing of a device or file, and neither reads nor writes what the program sees without an operator: a
// weight at home throws, and a gradient is only read.
std::vector<FusedOptimizer::StateOutside::Block> FusedOptimizer::StateOutside::blocks_of(
    const std::vector<Work>& works) const {
  const auto may_be_late = [this](const Work& work, size_t i) {
    return !disk_ && !work.states[i]->device.is_cpu() && work.gradients[i].is_cpu() && !work.grad_scale.defined() &&
           !work.found_inf.defined() && detail::values_at_home(work.parameters[i]).defined();
  };
  std::vector<Block> blocks;
  for (const Work& work : works) {
    bool is_first = true;
    for (size_t i = 0; i < work.parameters.size(); ++i) {
      const bool is_late = may_be_late(work, i);
      const ParameterState& state = *work.states[i];
      const int64_t all = work.parameters[i].numel();
      for (int64_t p = 0; p < pieces_in(all, state.piece); ++p) {
        const Piece piece{i, p * state.piece, std::min((p + 1) * state.piece, all)};
        const int64_t bytes = cut_.bytes_of(state, piece.begin, piece.end);
        if (is_first || is_late || blocks.back().bytes + bytes > cut_.slot_bytes) {
          blocks.push_back({&work, is_late, {}, 0});
        }
        is_first = is_late;
        blocks.back().pieces.push_back(piece);
        blocks.back().bytes += bytes;
      }
    }
  }
  std::ranges::stable_partition(blocks, [](const Block& one) { return !one.is_late; });
  return blocks;
}

// Makes the Work of a block, on tensors of the host: the elements that pass through the window lie in `memory`. Lists
// the parts of the file to read, the copies from and to a device, and the copies (to, from) that give new tensors their
// first values.
void FusedOptimizer::StateOutside::fill(const Block& block, const at::Tensor& memory,
                                        std::optional<std::string_view> copied, Streamed& streamed, Work& work,
                                        std::vector<std::pair<at::Tensor, at::Tensor>>& first_values,
                                        std::vector<detail::StatePart>& parts, DeviceCopies& copies) const {
  const Work& all = *block.work;
  work.options = all.options;
  work.grad_scale = all.grad_scale;
  work.found_inf = all.found_inf;
  const bool is_skipped = all.found_inf.defined() && all.found_inf.item<float>() != 0;
  int64_t used = 0;
  const auto in_window = [&](const at::Tensor& like, int64_t begin, int64_t end) {
    const int64_t bytes = (end - begin) * static_cast<int64_t>(like.element_size());
    const at::Tensor flat = memory.narrow(0, used, bytes).view(like.scalar_type());
    used += aligned(bytes);
    const bool is_whole = end - begin == like.numel() && like.is_contiguous();
    return is_whole ? flat.view(like.sizes()) : flat;
  };
  for (const Piece& piece : block.pieces) {
    ParameterState& whole = *all.states[piece.parameter];
    const at::Tensor& parameter = all.parameters[piece.parameter];
    const at::Tensor at_home = whole.device.is_cpu() ? at::Tensor() : detail::values_at_home(parameter);
    auto state = std::make_unique<ParameterState>();
    state->made_for = whole.made_for;
    state->device = whole.device;
    state->is_fresh = whole.is_fresh;
    bool is_read = true;  // whether the kernel reads the parameter, and not only its copy in the state
    at::Tensor first_value;
    for (const auto& [name, tensor] : whole.tensors) {
      const FileSpan span = tensor.dim() == 0
                                ? FileSpan{0, 1}
                                : span_of(tensor, parameter.numel(), cut_.multiple, piece.begin, piece.end);
      bool is_new = whole.is_fresh;
      if (!whole.in_file.contains(name)) {
        state->tensors.emplace_back(name, elements_of(tensor, span.begin, span.end));
      } else {
        ParameterState::InFile& place = whole.in_file.at(name);
        const auto size = static_cast<int64_t>(tensor.element_size());
        state->tensors.emplace_back(name, in_window(tensor, span.begin, span.end));
        parts.push_back({.memory = state->tensors.back().second.mutable_data_ptr(),
                         .bytes = (span.end - span.begin) * size,
                         .offset = place.offset + span.begin * size,
                         .sum = &place.sums[number_of(piece.begin, whole.piece)]});
        is_new = !parts.back().sum->has_value();
      }
      if (name == copied) {
        is_read = is_new;
        first_value = is_new ? state->tensors.back().second : at::Tensor();
      }
    }
    at::Tensor own = elements_of(at_home.defined() ? at_home : parameter, piece.begin, piece.end);
    at::Tensor gradient = elements_of(all.gradients[piece.parameter], piece.begin, piece.end);
    if (!whole.device.is_cpu()) {
      at::Tensor gradient_there;
      if (!gradient.is_cpu()) {
        gradient_there = std::exchange(gradient, in_window(parameter, piece.begin, piece.end));
        copies.in.emplace_back(gradient, gradient_there);
      }
      if (at_home.defined()) {
        copies.at_home.push_back(parameter);
      } else {
        const at::Tensor there = std::exchange(own, in_window(parameter, piece.begin, piece.end));
        if (is_read) {
          copies.in.emplace_back(own, there);
        }
        if (!is_skipped) {
          copies.out.emplace_back(there, own);
        }
      }
      if (gradient_there.defined() && !is_skipped && all.grad_scale.defined() && !detail::is_low(gradient)) {
        copies.out.emplace_back(gradient_there, gradient);  // the kernel unscales the gradient in place
      }
    }
    if (first_value.defined()) {
      first_values.emplace_back(first_value, own);
    }
    work.parameters.push_back(own);
    work.gradients.push_back(gradient);
    work.first_elements.push_back(all.first_elements[piece.parameter] + static_cast<uint64_t>(piece.begin));
    work.states.push_back(state.get());
    streamed.states.push_back(std::move(state));
    streamed.whole.push_back(&whole);
  }
}

FusedOptimizer::StateOutside::Streamed FusedOptimizer::StateOutside::stream(
    const std::vector<Work>& works, const std::function<std::function<void()>(const Work&)>& prepare,
    std::optional<std::string_view> copied) {
  constexpr size_t kInMemory = detail::StateStream::kInMemory;
  const std::vector<Block> blocks = blocks_of(works);
  int64_t slot = 0;
  for (const Block& block : blocks) {
    slot = std::max(slot, block.bytes);
  }
  const bool is_pinned = std::ranges::any_of(works, [](const Work& w) { return !w.parameters.front().is_cpu(); });
  Streamed result;
  result.window = on_host(is_pinned, [&] {
    return at::empty({static_cast<int64_t>(std::min(kInMemory, blocks.size())) * slot},
                     at::TensorOptions(at::kByte).pinned_memory(is_pinned));
  });
  const auto now = static_cast<size_t>(std::ranges::count_if(blocks, [](const Block& one) { return !one.is_late; }));
  std::vector<detail::StateBlock> stream;
  const auto copies = std::make_shared<std::vector<DeviceCopies>>(blocks.size());
  for (size_t b = 0; b < blocks.size(); ++b) {
    Work work;
    detail::StateBlock& next = stream.emplace_back();
    std::vector<std::pair<at::Tensor, at::Tensor>> first_values;
    fill(blocks[b], result.window.narrow(0, static_cast<int64_t>(b % kInMemory) * slot, slot), copied, result, work,
         first_values, next.parts, (*copies)[b]);
    std::vector<at::Tensor> pieces = work.parameters;  // parameters may lie in files, too
    pieces.insert(pieces.end(), work.gradients.begin(), work.gradients.end());
    next.update = [b, now, copies, first_values = std::move(first_values),
                   write = on_host(is_pinned, [&] { return prepare(work); }), states = work.states, pieces] {
      // The copies to the next block's memory run while this block is updated.
      for (size_t begun = b == 0 ? 0 : b + 1; begun < std::min(b + 2, now); ++begun) {
        (*copies)[begun].begin();
      }
      (*copies)[b].wait();
      for (const auto& [to, from] : first_values) {
        to.copy_(from);
      }
      for (ParameterState* state : states) {
        state->is_fresh = false;
      }
      write();
      (*copies)[b].end();
      if (b > 0) {
        (*copies)[b - 1].wait();  // the next user of the memory may be another device, or a file
      }
      std::for_each(pieces.begin(), pieces.end(), detail::let_go_of_pages);
    };
    if (blocks[b].is_late) {
      const size_t i = blocks[b].pieces.front().parameter;
      if (blocks[b].pieces.front().begin == 0) {
        const Work& all = *blocks[b].work;
        std::vector<at::Tensor>& used = result.late.emplace_back().used;
        used = {all.parameters[i], all.gradients[i]};
        std::ranges::transform(all.states[i]->tensors, std::back_inserter(used),
                               [](auto& named) { return named.second; });
      }
      result.states.back()->is_fresh = false;  // prepared, and no found_inf
      result.late.back().updates.push_back(std::move(next.update));
      stream.pop_back();
    }
  }
  if (disk_) {
    result.stream = std::make_unique<detail::StateStream>(*disk_, std::move(stream));
    result.stream->wait_for_first();
  } else {
    std::ranges::transform(stream, std::back_inserter(result.updates),
                           [](auto& block) { return std::move(block.update); });
  }
  return result;
}

void FusedOptimizer::StateOutside::Streamed::run() {
  if (stream) {
    stream->run();
  }
  for (const auto& update : updates) {
    update();
  }
  for (size_t i = 0; i < states.size(); ++i) {
    whole[i]->is_fresh = states[i]->is_fresh;
  }
}

int64_t FusedOptimizer::StateOutside::workspace_bytes(const std::vector<ParameterState>& states, const StateFile& file,
                                                      int64_t multiple) {
  constexpr auto kInMemory = static_cast<int64_t>(detail::StateStream::kInMemory);
  constexpr int64_t kScalars = 2 * sizeof(float);  // a count of steps, and the next one
  const Cut cut(file, multiple);
  int64_t slot = cut.slot_bytes, all = 0, scalars = 0;
  for (const ParameterState& state : states) {
    const int64_t piece = cut.piece_of(state);
    slot = std::max(slot, cut.bytes_of(state, 0, piece));
    all += cut.bytes_of(state, 0, state.made_for.numel());
    scalars += kScalars * pieces_in(state.made_for.numel(), piece);
  }
  return kInMemory * std::min(slot, all) + scalars;
}

}  // namespace snug
