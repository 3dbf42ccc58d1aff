#include "src/optim/state_in_file.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "snug/core.h"

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

void check(const std::string& failure) {
  if (!failure.empty()) {
    throw Error(fmt::format("keep_state_in: {}; give a directory on another disk", failure));
  }
}

}  // namespace

// Elements begin to end - 1 of a parameter of a Work.
struct FusedOptimizer::StateInFile::Piece {
  size_t parameter;
  int64_t begin, end;
};

struct FusedOptimizer::StateInFile::Block {
  const Work* work;
  std::vector<Piece> pieces;
  int64_t bytes;
};

FusedOptimizer::StateInFile::StateInFile(const StateFile& file, int64_t multiple, detail::SpillCalls& calls)
    : file_(file), cut_(file, multiple), calls_(calls), disk_(file.directory, calls) {}

// --- cutting of states

FusedOptimizer::StateInFile::Cut::Cut(const StateFile& file, int64_t state_multiple)
    : slot_bytes(file.window.count() / static_cast<int64_t>(detail::StateStream::kInMemory)),
      multiple(state_multiple) {}

int64_t FusedOptimizer::StateInFile::Cut::bytes_of(const ParameterState& state, int64_t begin, int64_t end) const {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state.tensors) {
    if (tensor.dim() > 0) {
      const FileSpan span = span_of(tensor, state.made_for.numel(), multiple, begin, end);
      bytes += aligned((span.end - span.begin) * static_cast<int64_t>(tensor.element_size()));
    }
  }
  return bytes;
}

// The largest number of elements, a multiple of `multiple`, whose state fits into a part of the window.
int64_t FusedOptimizer::StateInFile::Cut::piece_of(const ParameterState& state) const {
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

void FusedOptimizer::StateInFile::place(ParameterState& state) {
  int64_t end = end_;
  std::map<std::string_view, ParameterState::InFile> placed;
  const int64_t piece = state.in_file.empty() ? cut_.piece_of(state) : state.piece;
  for (const auto& [name, tensor] : state.tensors) {
    if (tensor.is_meta() && tensor.dim() > 0 && !state.in_file.contains(name)) {
      placed[name] = {
          .offset = end,
          .sums = std::vector<std::optional<uint64_t>>(static_cast<size_t>(pieces_in(state.made_for.numel(), piece)))};
      end += aligned(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  check(disk_.reserve(end - end_, end_));
  for (auto& [name, tensor] : state.tensors) {
    if (tensor.is_meta() && tensor.dim() == 0) {
      tensor = at::zeros({}, tensor.options().device(state.device));
    }
  }
  state.piece = piece;
  state.in_file.merge(placed);
  end_ = end;
}

void FusedOptimizer::StateInFile::write(ParameterState& state, std::string_view name, const at::Tensor& value) {
  const at::Tensor& like = state.at(name);
  const bool is_laid_out =
      value.is_cpu() && (value.strides() == like.strides() || (value.is_contiguous() && like.is_contiguous()));
  const at::Tensor from =
      is_laid_out ? value
                  : at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU)).copy_(value);
  ParameterState::InFile& place = state.in_file.at(name);
  const int64_t all = state.made_for.numel(), bytes = static_cast<int64_t>(like.element_size());
  for (size_t i = 0; i < place.sums.size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * state.piece;
    const FileSpan span = span_of(like, all, cut_.multiple, begin, std::min(begin + state.piece, all));
    const at::Tensor part = elements_of(from, span.begin, span.end).to(like.scalar_type());
    uint64_t sum = 0;
    check(disk_.write(part.const_data_ptr(), (span.end - span.begin) * bytes, place.offset + span.begin * bytes, sum));
    place.sums[i] = sum;
  }
}

at::Tensor FusedOptimizer::StateInFile::read(const ParameterState& state, std::string_view name) {
  const at::Tensor& like = state.at(name);
  at::Tensor result = at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU));
  const ParameterState::InFile& place = state.in_file.at(name);
  const int64_t all = state.made_for.numel(), bytes = static_cast<int64_t>(like.element_size());
  for (size_t i = 0; i < place.sums.size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * state.piece;
    const FileSpan span = span_of(like, all, cut_.multiple, begin, std::min(begin + state.piece, all));
    at::Tensor part = elements_of(result, span.begin, span.end);
    if (place.sums[i]) {
      check(disk_.read(part.mutable_data_ptr(), (span.end - span.begin) * bytes, place.offset + span.begin * bytes,
                       *place.sums[i]));
    } else {
      part.zero_();
    }
  }
  return result;
}

at::Tensor FusedOptimizer::StateInFile::lent(const ParameterState& state, std::string_view name,
                                             const std::shared_ptr<detail::FileMemory>& memory) {
  const at::Tensor& like = state.at(name);
  return detail::tensor_in(memory, state.in_file.at(name).offset, like.sizes(), like.strides(), like.scalar_type());
}

// --- the update

// Small parameters share a block.
std::vector<FusedOptimizer::StateInFile::Block> FusedOptimizer::StateInFile::blocks_of(
    const std::vector<Work>& works) const {
  std::vector<Block> blocks;
  for (const Work& work : works) {
    bool is_first = true;
    for (size_t i = 0; i < work.parameters.size(); ++i) {
      const ParameterState& state = *work.states[i];
      const int64_t all = work.parameters[i].numel();
      for (int64_t p = 0; p < pieces_in(all, state.piece); ++p) {
        const Piece piece{i, p * state.piece, std::min((p + 1) * state.piece, all)};
        const int64_t bytes = cut_.bytes_of(state, piece.begin, piece.end);
        if (is_first || blocks.back().bytes + bytes > cut_.slot_bytes) {
          blocks.push_back({&work, {}, 0});
        }
        is_first = false;
        blocks.back().pieces.push_back(piece);
        blocks.back().bytes += bytes;
      }
    }
  }
  return blocks;
}

// Makes the Work of a block, whose states lie in `memory`, and lists the parts of the file to read.
void FusedOptimizer::StateInFile::fill(const Block& block, const at::Tensor& memory, Streamed& streamed, Work& work,
                                       std::vector<detail::StatePart>& parts) const {
  const Work& all = *block.work;
  work.options = all.options;
  work.grad_scale = all.grad_scale;
  work.found_inf = all.found_inf;
  int64_t used = 0;
  for (const Piece& piece : block.pieces) {
    ParameterState& whole = *all.states[piece.parameter];
    const at::Tensor& parameter = all.parameters[piece.parameter];
    auto state = std::make_unique<ParameterState>();
    state->made_for = whole.made_for;
    state->device = whole.device;
    state->is_fresh = whole.is_fresh;
    for (const auto& [name, tensor] : whole.tensors) {
      if (!whole.in_file.contains(name)) {
        state->tensors.emplace_back(name, tensor);
        continue;
      }
      ParameterState::InFile& place = whole.in_file.at(name);
      const FileSpan span = span_of(tensor, parameter.numel(), cut_.multiple, piece.begin, piece.end);
      const auto size = static_cast<int64_t>(tensor.element_size());
      const int64_t bytes = (span.end - span.begin) * size;
      const at::Tensor flat = memory.narrow(0, used, bytes).view(tensor.scalar_type());
      const bool is_whole = span.end - span.begin == tensor.numel() && tensor.is_contiguous();
      state->tensors.emplace_back(name, is_whole ? flat.view(tensor.sizes()) : flat);
      parts.push_back({.memory = flat.mutable_data_ptr(),
                       .bytes = bytes,
                       .offset = place.offset + span.begin * size,
                       .sum = &place.sums[number_of(piece.begin, whole.piece)]});
      used += aligned(bytes);
    }
    work.parameters.push_back(elements_of(parameter, piece.begin, piece.end));
    work.gradients.push_back(elements_of(all.gradients[piece.parameter], piece.begin, piece.end));
    work.first_elements.push_back(all.first_elements[piece.parameter] + static_cast<uint64_t>(piece.begin));
    work.states.push_back(state.get());
    streamed.states.push_back(std::move(state));
    streamed.whole.push_back(&whole);
  }
}

FusedOptimizer::StateInFile::Streamed FusedOptimizer::StateInFile::stream(
    const std::vector<Work>& works, const std::function<std::function<void()>(const Work&)>& prepare,
    std::optional<std::string_view> copied) {
  constexpr size_t kInMemory = detail::StateStream::kInMemory;
  const std::vector<Block> blocks = blocks_of(works);
  int64_t slot = 0;
  for (const Block& block : blocks) {
    slot = std::max(slot, block.bytes);
  }
  Streamed result;
  result.window = at::empty({static_cast<int64_t>(std::min(kInMemory, blocks.size())) * slot}, at::kByte);
  std::vector<detail::StateBlock> stream;
  for (size_t b = 0; b < blocks.size(); ++b) {
    Work work;
    detail::StateBlock& next = stream.emplace_back();
    fill(blocks[b], result.window.narrow(0, static_cast<int64_t>(b % kInMemory) * slot, slot), result, work,
         next.parts);
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
    for (size_t i = 0; copied && i < work.states.size(); ++i) {
      const Piece& piece = blocks[b].pieces[i];
      const ParameterState& whole = *blocks[b].work->states[piece.parameter];
      const auto place = whole.in_file.find(*copied);
      if (place != whole.in_file.end() && !place->second.sums[number_of(piece.begin, whole.piece)]) {
        copies.emplace_back(work.states[i]->at(*copied), work.parameters[i]);
      }
    }
    std::vector<at::Tensor> pieces = work.parameters;  // parameters may lie in files, too
    pieces.insert(pieces.end(), work.gradients.begin(), work.gradients.end());
    next.update = [copies = std::move(copies), write = prepare(work), states = work.states, pieces] {
      for (const auto& [to, from] : copies) {
        to.copy_(from);
      }
      for (ParameterState* state : states) {
        state->is_fresh = false;
      }
      write();
      std::for_each(pieces.begin(), pieces.end(), detail::let_go_of_pages);
    };
  }
  result.stream = std::make_unique<detail::StateStream>(disk_, std::move(stream));
  result.stream->wait_for_first();
  return result;
}

void FusedOptimizer::StateInFile::Streamed::finish() {
  for (size_t i = 0; i < states.size(); ++i) {
    whole[i]->is_fresh = states[i]->is_fresh;
  }
}

int64_t FusedOptimizer::StateInFile::workspace_bytes(const std::vector<ParameterState>& states, const StateFile& file,
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
