#include "src/activations/region_draws.h"

#include <utility>

namespace snug::detail {
namespace {

// Whether this scope decides about the operator's draw. In an inner recomputation the generator is already chosen, each
// time.
bool draws_by_itself(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  return traits.is_random && !call.random.from.defined() && traits.draws(Arguments(call.op, stack));
}

uint64_t next_key(CallKeys& keys, const c10::OperatorHandle& op, const Arguments& arguments) {
  return keys.next(origin_by_sizes(op, arguments), arguments);
}

}  // namespace

void ForwardDraws::call(const OperatorCall& call, Stack& stack) {
  if (!draws_by_itself(call, stack)) {
    call.proceed(stack);
    return;
  }
  note_if_moved();
  const uint64_t key = next_key(keys_, call.op, Arguments(call.op, stack));
  call.random.is_noted = true;
  call.proceed(stack);
  record_.draws.emplace(key, RegionDraws::Draw{call.random.before, record_.draws.size()});
  after_last_ = RngState::capture();
}

void ForwardDraws::note_if_moved() {
  if (after_last_.is_current()) {
    return;
  }
  record_.has_moved = true;
  RngState now = RngState::capture();
  if (record_.repeats_unseen) {
    record_.moved.emplace(record_.draws.size(), std::exchange(after_last_, std::move(now)));
  } else {
    after_last_ = std::move(now);
  }
}

RecomputeDraws::RecomputeDraws(const RegionDraws& record) : record_(record) { set_back_if_moved(nullptr); }

void RecomputeDraws::call(const OperatorCall& call, Stack& stack) {
  if (!draws_by_itself(call, stack)) {
    call.proceed(stack);
    return;
  }
  run(call, stack, next(call.op, Arguments(call.op, stack)));
}

// The recomputation passes over draws of the forward whose results exist by now, such as a table that is filled once.
const RegionDraws::Draw* RecomputeDraws::next(const c10::OperatorHandle& op, const Arguments& arguments) {
  const auto found = record_.draws.find(next_key(keys_, op, arguments));
  return found == record_.draws.end() ? nullptr : &found->second;
}

void RecomputeDraws::run(const OperatorCall& call, Stack& stack, const Draw* draw) {
  guard_.reset();
  call.random.from = draw != nullptr ? draw->from : copy_of_programs_generator(call.op, stack);
  call.proceed(stack);
  set_back_if_moved(draw);
}

void RecomputeDraws::pass_over(const Draw* draw) {
  guard_.reset();
  set_back_if_moved(draw);
}

void RecomputeDraws::set_back_if_moved(const Draw* after) {
  place_ = after != nullptr ? after->number + 1 : place_;
  const auto moved = record_.moved.find(place_);
  if (moved != record_.moved.end()) {
    guard_.emplace();
    moved->second.restore();
  }
}

}  // namespace snug::detail
