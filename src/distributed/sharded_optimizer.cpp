#include "snug/distributed/sharded_optimizer.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <variant>

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/core/optimizer_capabilities.h"
#include "src/core/unnamed_file.h"
#include "src/distributed/owners.h"
#include "src/distributed/process_group_impl.h"
#include "src/distributed/rank_writers.h"
#include "src/distributed/same_model.h"
#include "src/distributed/shard_layout.h"
#include "src/distributed/shard_state.h"
#include "src/optim/state_archive.h"
#include "src/optim/state_outside.h"

// How the state is divided
//
// Problem: each of N ranks must keep 1/N of the optimizer's state, for any FusedOptimizer. An optimizer that works
// element by element must keep the bits of the optimizer without sharding.
// Options: teach each optimizer about ranks; divide whole parameters only; or give an unchanged optimizer other
// parameters. Whole parameters divide unevenly: an embedding may be half of a model.
// Choice: pieces of parameters are separate tensors on the parameters' memory. This rank's optimizer (`own`) is an
// unchanged optimizer of this rank's pieces; `own` does not see the other pieces. A second optimizer, of all parameters
// (`whole`), is asked only for options and never steps, so `whole` has no state.
// Consequences:
// - Gradients of pieces are parts of the parameters' gradients, lent to the pieces during a step.
// - After an update, each rank broadcasts the rank's pieces.
// - A whole state is put together in a file (ProcessGroup::save_together).

namespace snug {

using torch::optim::OptimizerParamGroup;

namespace {

std::vector<at::Tensor> parameters_of(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : groups) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

// Unchanged: torch's constructor merges options with defaults.
void copy_options(const std::vector<OptimizerParamGroup>& from, std::vector<OptimizerParamGroup>& to) {
  for (size_t g = 0; g < from.size(); ++g) {
    to[g].set_options(from[g].options().clone());
  }
}

}  // namespace

class ShardedOptimizer::Impl {
 public:
  Impl(const std::vector<OptimizerParamGroup>& groups, std::shared_ptr<ProcessGroup> group, Factory make);

  // An optimizer of this rank's pieces, with the options of an optimizer of all parameters.
  std::unique_ptr<FusedOptimizer> make_own(FusedOptimizer& like) const;
  std::unique_ptr<FusedOptimizer> loaded(const StateDict& state, FusedOptimizer& new_whole) const;
  std::vector<detail::ShardPiece> layout() const;
  /// Throws ConfigError, on all ranks, if the parameters differ between ranks.
  void check_same_on_all_ranks() const;
  void cut();
  void take_new_parameters(const std::vector<OptimizerParamGroup>& groups);
  void lend_gradients() const;
  void check_agreed(const at::Tensor& infinity) const;
  void gather() const;
  int64_t gathering_bytes() const;
  void broadcast_pieces(ProcessGroup& ranks, bool are_whole) const;
  bool has_own() const { return own != nullptr; }
  int owner_of(const at::Tensor& parameter) const { return owners ? owners->of(parameter) : -1; }
  bool has_state() const { return own && !own->state().empty(); }
  StateDict own_state() const { return own ? own->state_dict().get<StateDict>("state") : StateDict(); }

  std::shared_ptr<ProcessGroup> group;
  Factory make;
  std::unique_ptr<FusedOptimizer> whole;
  std::unique_ptr<FusedOptimizer> own;  // null if this rank has no pieces
  std::vector<at::Tensor> parameters;   // of all groups, in order
  std::vector<detail::ShardPiece> pieces;
  std::vector<at::Tensor> views;                 // a view for each piece
  std::shared_ptr<const detail::Owners> owners;  // of parameters that stay whole; may be null
  StatePlacement placement;
  // The hook of the next step.
  std::function<void()> before_writing;
  at::Tensor grad_scale, found_inf;
};

ShardedOptimizer::Impl::Impl(const std::vector<OptimizerParamGroup>& groups, std::shared_ptr<ProcessGroup> with,
                             Factory factory)
    : group(std::move(with)), make(std::move(factory)) {
  if (group == nullptr || make == nullptr) {
    throw ConfigError("ShardedOptimizer: the process group or the factory is null; give both");
  }
  whole = make(groups);
  parameters = parameters_of(whole->param_groups());
}

void ShardedOptimizer::Impl::check_same_on_all_ranks() const {
  DataParallel::NamedTensors named;
  for (size_t i = 0; i < parameters.size(); ++i) {
    named.emplace_back(std::to_string(i), parameters[i]);
  }
  detail::check_same_model(*group, "the same options", named, {}, "ShardedOptimizer");
}

// Frozen parameters have no state, so frozen parameters are divided separately: also in equal parts, because a frozen
// parameter may be trained later.
std::vector<detail::ShardPiece> ShardedOptimizer::Impl::layout() const {
  std::vector<detail::ShardPiece> result;
  for (const bool is_trained : {true, false}) {
    std::vector<detail::ShardItem> items;
    for (const at::Tensor& parameter : parameters) {
      const bool is_divided_here = owner_of(parameter) < 0 && parameter.requires_grad() == is_trained;
      // A piece is a part of the memory, and a file has elements in order: both are the same if contiguous.
      items.push_back({is_divided_here ? parameter.numel() : 0, static_cast<int64_t>(parameter.element_size()),
                       parameter.is_contiguous()});
    }
    const auto some = detail::shard_layout(items, group->size(), whole->shard_multiple());
    result.insert(result.end(), some.begin(), some.end());
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int owner = parameters[i].numel() > 0 ? owner_of(parameters[i]) : -1;
    for (int rank = owner; owner >= 0 && rank < group->size(); rank += owners->group().size()) {
      result.push_back({i, rank, 0, parameters[i].numel()});  // one in each group of shards
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.parameter < b.parameter; });
  return result;
}

// Makes pieces, views and `own` again from `parameters`.
void ShardedOptimizer::Impl::cut() {
  pieces = layout();
  views.clear();
  for (const auto& piece : pieces) {
    const at::Tensor all = parameters[piece.parameter].detach();
    const bool is_whole = piece.begin == 0 && piece.end == all.numel();
    views.push_back(is_whole ? all : detail::memory_of(all, piece.begin, piece.end));
  }
  own = make_own(*whole);
}

std::unique_ptr<FusedOptimizer> ShardedOptimizer::Impl::make_own(FusedOptimizer& like) const {
  std::vector<OptimizerParamGroup> groups;
  std::vector<std::pair<std::string, at::Tensor>> names;
  std::vector<uint64_t> first_elements{0}, first_of_mine;  // of each parameter, and of each piece
  for (const at::Tensor& each : parameters) {
    first_elements.push_back(first_elements.back() + static_cast<uint64_t>(each.numel()));
  }
  size_t parameter = 0;
  size_t piece = 0;
  for (const auto& each : like.param_groups()) {
    parameter += each.params().size();
    std::vector<at::Tensor> mine;
    for (; piece < pieces.size() && pieces[piece].parameter < parameter; ++piece) {
      if (pieces[piece].rank == group->rank()) {
        mine.push_back(views[piece]);
        first_of_mine.push_back(first_elements[pieces[piece].parameter] + static_cast<uint64_t>(pieces[piece].begin));
        names.emplace_back(
            fmt::format("{}, elements {} to {}", pieces[piece].parameter, pieces[piece].begin, pieces[piece].end - 1),
            views[piece]);
      }
    }
    groups.emplace_back(std::move(mine), each.options().clone());
  }
  if (names.empty()) {
    return nullptr;
  }
  auto result = make(groups);
  copy_options(like.param_groups(), result->param_groups());
  result->name_parameters(names);
  result->number_elements(first_of_mine);
  result->keep_state_in(placement);
  return result;
}

// An optimizer of this rank's pieces, with this rank's share of `state`. The options of `state` go to `new_whole`.
std::unique_ptr<FusedOptimizer> ShardedOptimizer::Impl::loaded(const StateDict& state,
                                                               FusedOptimizer& new_whole) const {
  const auto& states = state.get<StateDict>("state");
  const auto& groups = state.get<StateDict>("param_groups");
  StateDict only_options;
  only_options.set("state", StateDict());
  only_options.set("param_groups", groups);
  new_whole.load_state_dict(only_options);
  std::vector<std::string> places;  // the name of each parameter's state
  size_t known = 0;
  for (const StateDict::Entry& each : groups.entries()) {
    const auto& params = groups.get<StateDict>(each.name).get<StateDict>("params");
    for (const StateDict::Entry& entry : params.entries()) {
      places.push_back(std::to_string(params.get<int64_t>(entry.name)));
      known += states.contains(places.back()) ? 1 : 0;
    }
  }
  if (known != states.size()) {
    throw CorruptFile(
        fmt::format("ShardedOptimizer.load_state_dict: the state is of {} parameters, of which this optimizer has {}",
                    states.size(), known));
  }
  auto result = make_own(new_whole);
  if (result) {
    StateDict share;
    share.set("state", detail::share_of(states, places, group->rank(), pieces, parameters));
    share.set("param_groups", result->state_dict().get<StateDict>("param_groups"));
    result->load_state_dict(share);
  }
  return result;
}

// A piece's gradient is the corresponding part of its parameter's gradient.
void ShardedOptimizer::Impl::lend_gradients() const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].rank != group->rank()) {
      continue;
    }
    const at::Tensor& parameter = parameters[pieces[i].parameter];
    at::Tensor gradient = parameter.grad();
    const bool is_cut = views[i].numel() != parameter.numel();
    if (gradient.defined() && is_cut) {
      if (gradient.is_sparse() || gradient.sizes() != parameter.sizes()) {
        throw ConfigError(fmt::format(
            "ShardedOptimizer.step: the gradient of parameter {} is sparse, or has another shape than the parameter",
            pieces[i].parameter));
      }
      gradient = detail::memory_of(detail::laid_out_like(parameter, gradient), pieces[i].begin, pieces[i].end);
    }
    views[i].mutable_grad() = gradient;
  }
}

// Throws ConfigError, on all ranks, if only some ranks have found an infinity: each rank sees its own gradients.
void ShardedOptimizer::Impl::check_agreed(const at::Tensor& infinity) const {
  const int64_t found = infinity.item<double>() != 0 ? 1 : 0;
  std::array<int64_t, 2> any{found, 1 - found};  // whether any rank has found one, and whether any rank has found none
  detail::all_reduce(*group, any, ReduceOp::Max);
  if (any[0] + any[1] > 1) {
    throw ConfigError(
        "ShardedOptimizer.step: only some ranks have found infinite gradients, because no rank has all gradients in "
        "shards; set GradScaler::agree_by, so that all ranks decide alike");
  }
}

void ShardedOptimizer::Impl::gather() const {
  if (owners && owners->written) {
    owners->written();
  } else if (owners) {
    broadcast_pieces(owners->group(), /*are_whole=*/true);
  }
  broadcast_pieces(*group, /*are_whole=*/false);
  Autocast::clear_cache();
}

// `ranks`: consecutive ranks of `group`. `are_whole`: pieces of parameters that stay whole, or the other pieces.
void ShardedOptimizer::Impl::broadcast_pieces(ProcessGroup& ranks, bool are_whole) const {
  std::map<int, std::vector<at::Tensor>> of_ranks;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int rank = pieces[i].rank - (group->rank() - ranks.rank());
    if (rank >= 0 && rank < ranks.size() && are_whole == (owner_of(parameters[pieces[i].parameter]) >= 0)) {
      of_ranks[rank].push_back(views[i]);
    }
  }
  for (const auto& [rank, theirs] : of_ranks) {
    if (ranks.size() > 1) {
      ranks.broadcast(theirs, rank);
    }
  }
}

// The state of all ranks, for a save.
class ShardedOptimizer::Saved final : public detail::KeptOnRanks {
 public:
  explicit Saved(Impl& optimizer) : KeptOnRanks(*optimizer.group), optimizer_(optimizer) {}

  void begin_save(detail::Writers& writers) override {
    StateDict mine;
    writers.together([&] { mine = optimizer_.own_state(); });
    whole = detail::whole_state(*optimizer_.group, mine, optimizer_.pieces, optimizer_.parameters);
  }
  void end_save() noexcept override { whole.reset(); }
  std::vector<detail::Writers::Part> parts_of(const at::Tensor& tensor) const override {
    if (!whole) {
      return {};
    }
    const auto found = whole->parts.find(tensor.unsafeGetTensorImpl());
    return found != whole->parts.end() ? found->second : std::vector<detail::Writers::Part>();
  }

  std::optional<detail::WholeState> whole;

 private:
  Impl& optimizer_;
};

ShardedOptimizer::ShardedOptimizer(std::unique_ptr<Impl> impl)
    : torch::optim::Optimizer(impl->whole->param_groups(), impl->whole->defaults().clone()),
      impl_(std::move(impl)),
      saved_(std::make_unique<Saved>(*impl_)) {
  copy_options(impl_->whole->param_groups(), param_groups_);
}

ShardedOptimizer::ShardedOptimizer(const std::vector<OptimizerParamGroup>& groups, std::shared_ptr<ProcessGroup> group,
                                   Factory make)
    : ShardedOptimizer([&] {
        auto impl = std::make_unique<Impl>(groups, std::move(group), std::move(make));
        impl->check_same_on_all_ranks();
        impl->cut();
        return impl;
      }()) {}

ShardedOptimizer::ShardedOptimizer(std::vector<at::Tensor> parameters, std::shared_ptr<ProcessGroup> group,
                                   Factory make)
    : ShardedOptimizer(std::vector{OptimizerParamGroup(std::move(parameters))}, std::move(group), std::move(make)) {}

ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) {
  impl_->grad_scale = std::move(grad_scale);
  impl_->found_inf = std::move(found_inf);
}

// A Stepper replaces 16-bit parameters by FP32 masters before the first step; a program may add groups until the first
// step.
void ShardedOptimizer::Impl::take_new_parameters(const std::vector<OptimizerParamGroup>& groups) {
  const auto are_same = [](const auto& a, const auto& b) {
    return std::equal(a.params().begin(), a.params().end(), b.params().begin(), b.params().end(),
                      [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
  };
  if (std::equal(groups.begin(), groups.end(), whole->param_groups().begin(), whole->param_groups().end(), are_same)) {
    return;
  }
  if (has_state()) {
    throw ConfigError("ShardedOptimizer: param_groups() hold other parameters than before; make a new optimizer");
  }
  Impl next(groups, group, make);
  next.placement = placement;
  next.owners = owners;
  next.cut();
  *this = std::move(next);
}

bool ShardedOptimizer::is_over(const ProcessGroup& group) const { return &group == impl_->group.get(); }
bool ShardedOptimizer::has_state() const { return impl_->has_state(); }
bool ShardedOptimizer::follows_another() const { return impl_->owners && impl_->owners.use_count() > 1; }

void ShardedOptimizer::follow(std::shared_ptr<const detail::Owners> owners) {
  impl_->take_new_parameters(param_groups_);
  impl_->owners = std::move(owners);
  impl_->cut();
}

bool ShardedOptimizer::takes(at::ScalarType dtype) const { return impl_->whole->takes(dtype); }

bool ShardedOptimizer::before_writing(std::function<void()> hook) {
  impl_->before_writing = std::move(hook);
  return true;
}

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  const auto hook = std::exchange(impl_->before_writing, {});
  const at::Tensor grad_scale = std::exchange(impl_->grad_scale, {});
  const at::Tensor found_inf = std::exchange(impl_->found_inf, {});
  bool has_told = hook != nullptr;
  if (impl_->owners && found_inf.defined() && !hook) {  // a Stepper's ranks have agreed
    impl_->check_agreed(found_inf);
  }
  const auto tell = [&] {
    has_told = true;
    if (const auto rank = detail::failed_rank(*impl_->group, nullptr)) {
      throw Error(fmt::format(
          "ShardedOptimizer.step: the update of rank {} has failed before it began, so no rank makes it; see that rank's "
          "error",
          *rank));
    }
  };
  try {
    impl_->take_new_parameters(param_groups_);
    if (impl_->owners && impl_->owners->before_writing) {
      impl_->owners->before_writing();
    }
    update_own(grad_scale, found_inf, hook ? hook : tell);
  } catch (...) {
    if (!has_told) {
      detail::failed_rank(*impl_->group, std::current_exception());
    }
    throw;
  }
  impl_->gather();
  return loss;
}

void ShardedOptimizer::update_own(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                                  const std::function<void()>& before_writing) {
  if (!impl_->has_own()) {
    before_writing();
    return;
  }
  copy_options(param_groups_, impl_->own->param_groups());
  // Takes the gradients back from the pieces, because a gradient must be free when the parameter releases the gradient.
  const auto give_back = c10::make_scope_exit([this] {
    for (const at::Tensor& piece : impl_->views) {
      piece.mutable_grad().reset();
    }
  });
  impl_->lend_gradients();
  impl_->own->set_gradient_scaling(grad_scale, found_inf);
  impl_->own->before_writing(before_writing);
  impl_->own->step();
}

StateDict ShardedOptimizer::state_dict() const {
  impl_->take_new_parameters(param_groups_);
  StateDict state;
  if (saved_->whole) {
    state.set("state", saved_->whole->state);
  } else if (impl_->group->size() == 1) {
    state.set("state", impl_->own_state());
  } else {
    throw ConfigError(fmt::format(
        "ShardedOptimizer.state_dict: rank {} has a share of the state only; save a snapshot on all ranks inside of "
        "ProcessGroup::save_together, and load the snapshot if the state is needed whole",
        impl_->group->rank()));
  }
  copy_options(param_groups_, impl_->whole->param_groups());
  state.set("param_groups", impl_->whole->state_dict().get<StateDict>("param_groups"));
  return state;
}

std::vector<at::Tensor> ShardedOptimizer::state_tensors() const { return detail::tensors_in(impl_->own_state()); }

// Code that may throw works on new optimizers. The new optimizers replace the old optimizers only after success on all
// ranks.
void ShardedOptimizer::load_state_dict(const StateDict& state) {
  std::unique_ptr<FusedOptimizer> whole, own;
  std::exception_ptr error;
  try {
    impl_->take_new_parameters(param_groups_);
    whole = impl_->make(impl_->whole->param_groups());
    own = impl_->loaded(state, *whole);
  } catch (...) {
    error = std::current_exception();
  }
  if (const auto rank = detail::failed_rank(*impl_->group, error)) {
    throw CorruptFile(fmt::format(
        "ShardedOptimizer.load_state_dict: the state does not fit the share of rank {}; see that rank's error", *rank));
  }
  impl_->whole = std::move(whole);
  impl_->own = std::move(own);
  copy_options(impl_->whole->param_groups(), param_groups_);
}

int64_t ShardedOptimizer::state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const {
  impl_->take_new_parameters(param_groups_);
  for (size_t i = 0; i < impl_->pieces.size(); ++i) {  // set only for the count below
    impl_->views[i].set_requires_grad(gets_gradient(impl_->parameters[impl_->pieces[i].parameter]));
  }
  return impl_->has_own() ? impl_->own->state_bytes_to_come() : 0;
}

// The larger of two workspaces, because the workspace of the own share's update is free again before the shares are
// gathered.
int64_t ShardedOptimizer::workspace_bytes() const {
  impl_->take_new_parameters(param_groups_);
  return std::max(impl_->gathering_bytes(), impl_->has_own() ? impl_->own->workspace_bytes() : 0);
}

// A broadcast of several tensors copies the tensors together first, and Gloo's threads may keep the copies of the last
// tensors a little longer.
int64_t ShardedOptimizer::Impl::gathering_bytes() const {
  constexpr size_t kCopies = 3;  // the copy that is sent, and a copy for each of two threads
  if (group->size() == 1) {
    return 0;
  }
  std::vector<int64_t> bytes(static_cast<size_t>(group->size()));
  int64_t largest = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool is_whole = owner_of(parameters[pieces[i].parameter]) >= 0;
    if (is_whole &&
        (owners->written || pieces[i].rank / owners->group().size() != group->rank() / owners->group().size())) {
      continue;  // not sent, or not to this rank
    }
    const auto of_piece = static_cast<int64_t>(views[i].nbytes());
    bytes[static_cast<size_t>(pieces[i].rank)] += of_piece;
    largest = std::max(largest, of_piece);
  }
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  bytes.resize(std::min(bytes.size(), kCopies));
  const int64_t in_chunks = static_cast<int64_t>(kCopies + 1) * (ProcessGroup::Impl::kBroadcastChunk + largest);
  return std::min(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), in_chunks);
}

bool ShardedOptimizer::keep_state_in(const StatePlacement& place) {
  impl_->take_new_parameters(param_groups_);
  const bool is_on_cpu =
      std::ranges::all_of(impl_->parameters, [](const at::Tensor& parameter) { return parameter.is_cpu(); });
  StatePlacement lasting = std::holds_alternative<StateOnHost>(place) && is_on_cpu ? StateOnDevice() : place;
  if (auto* file = std::get_if<StateFile>(&lasting)) {
    file->directory = detail::lasting(file->directory);
  }
  if (!impl_->has_own()) {
    detail::check_window("ShardedOptimizer", lasting);
  } else if (!impl_->own->keep_state_in(place)) {
    return false;
  }
  impl_->placement = std::move(lasting);
  return true;
}

StatePlacement ShardedOptimizer::state_placement() const { return impl_->placement; }

bool ShardedOptimizer::may_stay_on_device() const { return !impl_->has_own() || impl_->own->may_stay_on_device(); }

// The window is free again before the shares are gathered.
MovableState::PlacementBytes ShardedOptimizer::bytes_with_state_in(const StatePlacement& place) const {
  impl_->take_new_parameters(param_groups_);
  if (!impl_->has_own()) {
    return {};
  }
  MovableState::PlacementBytes bytes = impl_->own->bytes_with_state_in(place);
  if (bytes.moved == 0) {
    return {};
  }
  bytes.workspace = std::max(bytes.workspace, impl_->gathering_bytes());
  return bytes;
}

void ShardedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  if (saved_->whole) {
    throw ConfigError(
        "ShardedOptimizer.save: one rank writes torch's archive, and ProcessGroup::save_together saves the state of all "
        "ranks; save a snapshot (SnapshotStore) instead");
  }
  detail::write_state(archive, state_dict());
}
void ShardedOptimizer::load(torch::serialize::InputArchive& archive) { load_state_dict(detail::read_state(archive)); }

}  // namespace snug
