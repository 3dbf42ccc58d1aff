#pragma once
// TapeOperator: one operator of an OpTape, with everything needed to run the operator again.

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "snug/checkpoint.h"
#include "src/memory/operator_mode.h"
#include "src/planner/profile.h"

namespace snug::detail {

struct TapeOperator {
  struct Operand {
    size_t argument;
    std::optional<size_t> element;  // position in a list argument
    plan::Value value;
    at::Tensor shape;  // has no memory
  };
  struct Result {
    size_t result;
    std::optional<size_t> element;
    int storage;
  };

  c10::OperatorHandle op;
  CallContext context;
  // Elements lie inside TapeOperator: most operators have few elements of each list, and a tape has many operators.
  c10::SmallVector<c10::IValue, 4> arguments;  // tensors removed
  c10::SmallVector<Operand, 3> operands;
  c10::SmallVector<Result, 1> results;     // only results on new storages
  c10::SmallVector<plan::Value, 3> needs;  // values read, and for each write the version before
  c10::SmallVector<plan::Value, 2> writes;
  bool is_replayable = true;
  at::Generator drew_from = {};  // the generator's state before the operator
};

/// An operator under way: the record, and facts that nobody asks for after the operator.
struct RunningOperator {
  TapeOperator record;
  size_t first_result;  // position on the stack
  c10::SmallVector<const c10::StorageImpl*, 1> given =
      {};  // arguments that are storages without a tensor, as for set_()
  bool reads_batch_statistics = false;
  std::vector<std::pair<int, const void*>> made = {};  // for the listener: new storages, with the addresses of bytes
  // In a region only (tape_region.cpp).
  bool is_in_graph = false;          // reads values of a tensor that requires a gradient, in gradient mode
  bool is_drawn = false;             // outside of the graph: draws, or computes from random values
  bool makes_blank = false;          // outside of the graph: reads no values and draws nothing
  Keep treatment = Keep::Recompute;  // of the results
};

}  // namespace snug::detail
