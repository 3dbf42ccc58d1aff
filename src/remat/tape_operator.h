#pragma once
// TapeOperator: one operator of an OpTape, with all that it takes to run it again.

#include <cstddef>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "snug/profile.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

struct TapeOperator {
  struct Operand {
    size_t argument;
    std::optional<size_t> element;  // of a list
    ValueId value;
    at::Tensor shape;  // without memory
  };
  struct Result {
    size_t result;
    std::optional<size_t> element;
    int storage;
  };

  c10::OperatorHandle op;
  CallContext context;
  // Most operators have few of each, and there are many operators: so they lie in here.
  c10::SmallVector<c10::IValue, 4> arguments;  // without their tensors
  c10::SmallVector<Operand, 3> operands;
  c10::SmallVector<Result, 1> results;  // those that are new storages
  c10::SmallVector<ValueId, 3> needs;   // what it read, and the version before of what it wrote
  c10::SmallVector<ValueId, 2> writes;
  bool is_replayable = true;
  bool reads_batch_statistics = false;
  at::Generator drew_from = {};  // as it was
};

}  // namespace snug::detail
