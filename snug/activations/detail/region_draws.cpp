#include "snug/activations/detail/region_draws.h"

#include <algorithm>

#include "snug/activations/detail/operator_traits.h"

namespace snug::detail {
namespace {

// A recomputation further in knows already what the operator is to draw from, each time.
bool draws_by_itself(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  return traits.is_random && !call.random.from.defined() && traits.draws(Arguments(call.op, stack));
}

}  // namespace

void ForwardDraws::call(const OperatorCall& call, Stack& stack) {
  if (!draws_by_itself(call, stack)) {
    call.proceed(stack);
    return;
  }
  note_if_moved();
  call.random.is_noted = true;
  call.proceed(stack);
  record_.draws.push_back({call.op, call.random.before});
  after_last_ = RngState::capture();
}

void ForwardDraws::note_if_moved() {
  if (!after_last_.is_current()) {
    record_.moved.emplace(record_.draws.size(), after_last_);
    after_last_ = RngState::capture();
  }
}

RecomputeDraws::RecomputeDraws(const RegionDraws& record) : record_(record) { set_back_if_moved(); }

void RecomputeDraws::call(const OperatorCall& call, Stack& stack) {
  if (!draws_by_itself(call, stack)) {
    call.proceed(stack);
    return;
  }
  guard_.reset();
  if (const auto* draw = find_next(call.op)) {
    call.random.from = draw->from;
  } else {
    guard_.emplace();  // the forward drew nothing here
  }
  call.proceed(stack);
  set_back_if_moved();
}

void RecomputeDraws::pass_over(const c10::OperatorHandle& op) {
  guard_.reset();
  find_next(op);
  set_back_if_moved();
}

// What the forward drew for something that is there by now, such as a table that is filled once, is passed over.
const RegionDraws::Draw* RecomputeDraws::find_next(const c10::OperatorHandle& op) {
  for (size_t i = place_; i < record_.draws.size(); ++i) {
    if (record_.draws[i].op == op) {
      place_ = i + 1;
      return &record_.draws[i];
    }
  }
  return nullptr;
}

void RecomputeDraws::set_back_if_moved() {
  const auto moved = record_.moved.find(place_);
  if (moved != record_.moved.end()) {
    guard_.emplace();
    moved->second.restore();
  }
}

}  // namespace snug::detail
