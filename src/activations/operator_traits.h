#pragma once
// The effects of an operator on its operands: from the operator's schema, and from a list of effects outside of
// schemas.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "src/memory/operator_mode.h"

namespace snug::detail {

/// The arguments of a call, on top of the stack.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, Stack& stack)
      : count_(op.schema().arguments().size()), first_(stack.data() + (stack.size() - count_)) {}

  size_t size() const { return count_; }
  c10::IValue& operator[](size_t i) const { return first_[i]; }
  c10::IValue* begin() const { return first_; }
  c10::IValue* end() const { return first_ + count_; }

 private:
  size_t count_;
  c10::IValue* first_;
};

struct OperatorTraits {
  std::vector<size_t> written;  ///< arguments that are written
  std::vector<size_t>
      statistics;          ///< running statistics, written if `training` says so, although the schema shows no write
  int training = -1;       ///< the argument `training`; -1: statistics are always written
  bool is_random = false;  ///< may draw from a generator
  int dropout = -1;        ///< the argument with the probability, if the operator draws nothing for 0
  int train = -1;          ///< the argument that switches drawing on
  int stream = -1;         ///< the argument with a stream, as in record_stream(); the operator then writes nothing
  bool is_view = false;    ///< the results are views of an argument's memory
  bool reads_no_values = false;  ///< uses only the shape and the kind of its arguments, as zeros_like does
  bool has_own_state = false;    ///< draws from a state of its own, outside of all generators
  bool may_normalise = false;    ///< batch normalisation: see reads_batch_statistics()
  bool is_collective = false;    ///< writes to its arguments, although the schema shows no write

  bool is_statistic(size_t argument) const { return std::ranges::find(statistics, argument) != statistics.end(); }
  /// Whether this call writes the argument.
  bool writes(const Arguments& arguments, size_t argument) const;
  /// Whether this call draws from a generator.
  bool draws(const Arguments& arguments) const;
  /// Whether this call normalises by the statistics of several items. Instance normalisation calls the same operators
  /// with a single item.
  bool reads_batch_statistics(const Arguments& arguments) const;
  /// Whether this call draws from a state of its own, so that nobody can draw the numbers again.
  bool draws_from_own_state(const Arguments& arguments) const;

 private:
  bool has_dropout(const Arguments& arguments) const;
};

const OperatorTraits& traits_of(const c10::OperatorHandle& op);

/// Whether a byte tensor saved by autograd is the workspace of a recurrent layer. Some bytes of a workspace are never
/// filled. `producer` is the operator that made the tensor.
bool is_workspace(const c10::OperatorHandle& producer, const at::Tensor& tensor);

/// Calls f(Tensor&, argument) for each tensor that this call writes; for a collective, for each tensor that the call
/// may write.
template <class F>
void visit_written(const OperatorTraits& traits, const Arguments& arguments, F&& f) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.is_collective || traits.writes(arguments, i)) {
      visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) { f(tensor, i); });
    }
  }
}

}  // namespace snug::detail
