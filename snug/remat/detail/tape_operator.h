#pragma once
// TapeOperator: one operator of an OpTape, with all that it takes to run it again.

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "snug/memory/detail/operator_mode.h"
#include "snug/planner/profile.h"

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
  std::vector<c10::IValue> arguments;  // without their tensors
  std::vector<Operand> operands;
  std::vector<Result> results;  // those that are new storages
  std::vector<ValueId> needs;   // what it read, and the version before of what it wrote
  std::vector<ValueId> writes;
  bool is_replayable = true;
  at::Generator drew_from = {};  // as it was
};

}  // namespace snug::detail
