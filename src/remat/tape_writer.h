#pragma once
// TapeWriter: makes the records of operators. tape_writer.cpp says what a record has, and how an operator is compared
// with the schedule; tape_region.cpp says what a region notes about operands.

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/activations/operator_traits.h"
#include "src/remat/tape_replays.h"
#include "src/remat/tape_shapes.h"

namespace snug::detail {

class TapeWriter {
 public:
  TapeWriter(TapeState& state, TapeStorages& storages, TapeReplays& replays)
      : state_(state), storages_(storages), replays_(replays) {}

  /// An operator is about to run: reads its operands and announces its writes.
  RunningOperator begin(const OperatorCall& call, const OperatorTraits& traits, Stack& stack);
  /// The operator threw.
  void take_back(const RunningOperator& running);
  /// The operator has run: reads its results.
  void read_results(RunningOperator& running, const Stack& stack);
  void follow_schedule(const TapeOperator& record);
  void tell_listener(const RunningOperator& running) const;
  /// Notes that the tensor has got, or is about to get, values that no operator of the tape makes again: from outside
  /// of the tape, or as statistics that an operator moves.
  void note_unseen_write_to(const at::Tensor& tensor);
  /// A tensor without memory, but equal to the tensor in everything else.
  at::Tensor shape_of(const at::Tensor& tensor) { return shapes_.of(tensor); }
  /// Describes the first operator with larger results than scheduled; empty: none so far.
  const std::string& growth() const { return growth_; }

 private:
  using Tensors = c10::SmallVector<at::Tensor, 1>;

  void read_argument(RunningOperator& running, const c10::IValue& value, uint32_t argument);
  void read_tensor(RunningOperator& running, const at::Tensor& tensor, uint32_t argument,
                   std::optional<uint32_t> element);
  void note_write(TapeOperator& record, const at::Tensor& tensor);
  void expect_writes(const Tensors& written);
  void save_from_write(const TapeOperator& record, const Tensors& written, const Tensors& statistics);
  void prepare_operands(RunningOperator& running, const Arguments& arguments);

  TapeState& state_;
  TapeStorages& storages_;
  TapeReplays& replays_;
  TapeShapes shapes_;
  std::string growth_;
};

}  // namespace snug::detail
