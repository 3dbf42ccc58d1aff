#include <algorithm>
#include <any>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include "src/activations/operator_traits.h"
#include "src/activations/storage_views.h"
#include "src/core/has_bytes.h"
#include "src/memory/backward_pass.h"
#include "src/remat/op_tape.h"

// Tensors saved by autograd, from saving to release
//
// Problem: backward asks for storages in an order that only the schedule predicts. A graph may be kept for a second
// pass, and a backward pass may run inside the forward pass or inside another backward pass.
//
// Choice: a saved tensor on a storage of the tape is a Slot: the storage's number and the tensor's shape. pack() makes
// the slot, unpack() finds or rebuilds the storage, and the slot's destructor tells the tape that autograd has released
// the tensor. The cursor follows the order of requests. When the schedule's last need of a storage is over, let_go()
// releases the storage.
//
// Consequences:
// - Requests from an inner pass do not move the cursor.
// - A pass that keeps the graph keeps what a second pass could not rebuild, and the second pass rebuilds the rest.

namespace snug::detail {

// Takes the place of a tensor that autograd saves. A pointer to the slot fits into a std::any without an allocation.
struct OpTape::Slot final : c10::intrusive_ptr_target {
  Slot(std::shared_ptr<OpTape> on, int of, at::Tensor tensor)
      : tape(std::move(on)), storage(of), shape(std::move(tensor)) {}
  ~Slot() override { tape->slot_is_gone(*this); }

  std::shared_ptr<OpTape> tape;
  int storage;
  at::Tensor shape;                 // has no memory
  int pass = -1;                    // the last pass that asked for the tensor
  bool is_used = false;             // backward has the tensor and will release the slot
  bool is_given = false;            // the tensor was given away with the memory
  std::optional<size_t> hash = {};  // of the values, for comparison with the rebuilt values
  int version = 0;                  // the version that was hashed
};

namespace {

bool keeps_its_graph(int pass) { return pass < 0 || torch::autograd::get_current_graph_task_keep_graph(); }

// The tensor without a graph, with the tensor's count of writes: detach(), without a call of the dispatcher.
at::Tensor as_saved(const at::Tensor& tensor) { return tensor.tensor_data(); }

}  // namespace

std::any OpTape::pack(const at::Tensor& tensor) {
  const std::lock_guard lock(state_->mutex);
  const TapeWorks works(state_->listener);
  if (state_->is_closed && current_pass() < 0 && deviation().empty()) {
    state_->cursor.deviate(
        "the forward pass went on after a backward pass had begun; make a Rematerialize for each forward pass");
  }
  if (state_->is_closed || !has_bytes(tensor)) {
    return as_saved(tensor);
  }
  if (state_->region && state_->region->outside != nullptr) {
    storages_->number_of(tensor);
  }
  const std::optional<int> known = storages_->known_number_of(tensor);
  if (!known || (storages_->at(*known).is_external() && storages_->at(*known).outside == nullptr)) {
    storages_->trust(tensor);
    return as_saved(tensor);
  }
  replays_.note_write_through_pointer(*known, tensor);
  TapeStorage& storage = storages_->at(*known);
  storage.is_rebuildable = storage.is_rebuildable && !storage.is_blank;  // until an operator fills the memory
  auto slot = c10::make_intrusive<Slot>(shared_from_this(), *known, writer_.shape_of(tensor));
  ++storage.slots;
  state_->listener->on_pack(slot->storage);
  storages_->settle(slot->storage);
  if (storages_->should_hold(slot->storage)) {
    mark_as_saved(tensor);
  }
  const int producer = storage.producers.front();
  const bool is_rebuilt = !storages_->is_kept(slot->storage);
  if (state_->verifies && is_rebuilt && !(producer >= 0 && is_workspace(replays_.at(producer).op, tensor))) {
    slot->hash = hash(tensor);
    slot->version = storages_->at(slot->storage).last_version();
    packed_.push_back(slot.get());
  }
  return slot;
}

// Reads the values with operators that the tape does not see.
size_t OpTape::hash(const at::Tensor& tensor) {
  const UnseenOperators unseen;
  return hashes_.add(tensor);
}

const std::set<int>& OpTape::different() {
  const UnseenOperators unseen;
  const std::vector<uint64_t>& hashes = hashes_.read();
  for (const Comparison& one : std::exchange(comparisons_, {})) {
    if (hashes[one.saved] != hashes[one.rebuilt]) {
      different_.insert(one.storage);
    }
  }
  return different_;
}

void OpTape::hash_what_was_filled() {
  for (Slot* const slot : std::exchange(packed_, {})) {
    if (slot->version != storages_->at(slot->storage).last_version()) {
      if (const c10::Storage memory = storages_->find(slot->storage)) {
        slot->hash = hash(on_storage(slot->shape, memory));
      }
    }
  }
}

void OpTape::begin_unpacking(Slot& slot, int pass) {
  const bool kept_graph = std::exchange(state_->keeps_graph, keeps_its_graph(pass));
  const bool begins = state_->cursor.begin(outermost_pass());
  if (state_->keeps_graph && (begins || !kept_graph) && !state_->region) {
    replays_.judge_all_again();
  }
  if (kept_graph && begins) {
    replays_.bring_back_what_is_kept();
  }
  slot.pass = pass;
  state_->cursor.arrive(slot.storage);
  storages_->finish_transfers_and_fetch();
}

// Releases the storages that the pass needs no more. If the graph is kept, another pass may come and rebuild the
// released storages.
void OpTape::let_go() {
  while (const TapeSchedule::Unpacking* over = state_->cursor.next_to_let_go()) {
    for (const int s : over->last_for) {
      TapeStorage& storage = storages_->at(s);
      const bool cannot_come_again = !storage.is_rebuildable && !storage.holding.is_away();
      storage.claimed = storage.claimed && cannot_come_again && (state_->keeps_graph || state_->cursor.is_guess());
      storages_->settle(s);
    }
    if (state_->keeps_graph) {
      storages_->settle(over->storage);
    }
  }
}

// Notes a request from a backward pass inside the forward pass or inside another backward pass, and returns whether the
// request comes from such a pass. While a step is recorded, the step's own pass keeps no graph. In a schedule, a
// storage that only inner passes ask for has no unpacking.
bool OpTape::note_ask_inside(int storage) {
  TapeStorage& s = storages_->at(storage);
  if (s.is_asked_inside) {
    return true;
  }
  const TapeSchedule::ForStorage* scheduled = state_->cursor.of(storage);
  const bool may_be_inside = state_->is_closed || state_->cursor.due(replays_.next()) != nullptr;
  s.is_asked_inside = (scheduled != nullptr && scheduled->unpacked_at.empty() && may_be_inside) ||
                      (state_->has_listener() && (!state_->is_closed || keeps_its_graph(current_pass())));
  if (s.is_asked_inside) {
    state_->listener->on_asked_inside(storage);
  }
  return s.is_asked_inside;
}

at::Tensor OpTape::values_of(const Slot& slot) {
  c10::Storage memory = storages_->bring(slot.storage);
  if (!memory) {
    memory = replays_.rebuild(slot.storage);
  }
  at::Tensor result = on_storage(slot.shape, memory);
  if (slot.hash) {
    comparisons_.push_back({slot.storage, *slot.hash, hash(result)});
  }
  return result;
}

at::Tensor OpTape::unpack(std::any& packed) {
  const auto* found = std::any_cast<c10::intrusive_ptr<Slot>>(&packed);
  if (found == nullptr) {
    return std::any_cast<at::Tensor&>(packed);
  }
  Slot& slot = **found;
  const int pass = current_pass();
  const std::lock_guard lock(state_->mutex);
  const TapeWorks works(state_->listener);
  if (state_->region && !state_->is_closed) {
    return values_of(slot);  // for a backward pass inside the region
  }
  if (state_->region) {
    replays_.begin_asking();
  }
  bool is_inside = note_ask_inside(slot.storage);
  if (!is_inside && !state_->is_closed) {
    close();
    is_inside = note_ask_inside(slot.storage);
  }
  if (is_inside || (slot.pass >= 0 && slot.pass == pass)) {
    return values_of(slot);
  }
  begin_unpacking(slot, pass);
  state_->listener->on_unpack(slot.storage);
  at::Tensor result = values_of(slot);
  if (!state_->keeps_graph && !std::exchange(slot.is_used, true)) {
    ++storages_->at(slot.storage).uses;
    storages_->settle(slot.storage);
  }
  if (state_->region) {
    replays_.note_asked(slot.storage);
  }
  let_go();
  state_->listener->after_unpack();
  return result;
}

std::any OpTape::pack_result(const at::Tensor& tensor) {
  const std::lock_guard lock(state_->mutex);
  if (const std::optional<int> known = storages_->known_number_of(tensor)) {
    replays_.add_result(*known);
  }
  return pack(tensor);
}

at::Tensor OpTape::look_at(std::any& packed) {
  const auto* slot = std::any_cast<c10::intrusive_ptr<Slot>>(&packed);
  if (slot == nullptr) {
    return std::any_cast<at::Tensor&>(packed);
  }
  const std::lock_guard lock(state_->mutex);
  state_->keeps_graph = keeps_its_graph(current_pass());
  replays_.begin_asking();
  at::Tensor result = values_of(**slot);
  replays_.note_asked((*slot)->storage);
  return result;
}

// Whether only the tape holds the memory, and only for this slot.
bool OpTape::gives_away(std::any& packed, const at::Tensor& unpacked) {
  const auto* slot = std::any_cast<c10::intrusive_ptr<Slot>>(&packed);
  if (slot == nullptr) {
    return false;
  }
  const std::lock_guard lock(state_->mutex);
  const TapeStorage& storage = storages_->at((*slot)->storage);
  constexpr size_t kTapeAndResult = 2, kOwnAndStrong = 2;
  const c10::Storage& memory = unpacked.storage();
  const size_t of_tape = storage.holding.address() == memory.unsafeGetStorageImpl() ? 1 : 0;
  const bool is_claimed = storage.claimed && !state_->cursor.is_guess();  // a guess also claims what nobody asks for
  const bool is_last = (*slot)->is_used && storage.slots == 1 && !is_claimed && !storage.is_source &&
                       !storages_->goes_away((*slot)->storage);
  (*slot)->is_given = is_last && storage.holding.is_own() && memory.use_count() == kTapeAndResult &&
                      memory.getWeakStorageImpl().weak_use_count() == kOwnAndStrong + of_tape;
  return (*slot)->is_given;
}

void OpTape::slot_is_gone(Slot& slot) {
  const std::lock_guard lock(state_->mutex);
  const TapeWorks works(state_->listener);
  TapeStorage& storage = storages_->at(slot.storage);
  std::erase(packed_, &slot);
  --storage.slots;
  if (slot.is_used) {
    --storage.uses;
    state_->listener->on_done(slot.storage);
  } else {
    state_->listener->on_unused(slot.storage);
  }
  if (state_->region) {
    storage.unasked = std::min(storage.unasked, storage.slots);
    storage.claimed = storage.claimed && storage.slots > 0;
  }
  storage.claimed = storage.claimed && !slot.is_given;
  storages_->settle(slot.storage);
  if (slot.is_given) {
    if (const c10::Storage memory = storage.holding.find()) {
      state_->listener->on_given_away(slot.storage, memory.data());
    }
    storage.holding.lose_sight();
  }
  if (!slot.is_used && state_->cursor.is_guess()) {
    state_->cursor.arrive(slot.storage);  // the guess said that somebody would ask for the storage
    let_go();
  }
}

}  // namespace snug::detail
