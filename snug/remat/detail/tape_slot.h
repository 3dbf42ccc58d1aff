#pragma once
// What an OpTape puts in the place of a tensor that autograd saves.

#include <cstdint>
#include <memory>
#include <optional>

#include "snug/remat/detail/op_tape.h"

namespace snug::detail {

struct OpTape::Slot {
  Slot(std::shared_ptr<OpTape> on, int of, at::Tensor tensor)
      : tape(std::move(on)), storage(of), shape(std::move(tensor)) {}
  ~Slot() { tape->slot_is_gone(*this); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  std::shared_ptr<OpTape> tape;
  int storage;
  at::Tensor shape;                     // without memory
  int pass = -1;                        // the last one that asked for it
  bool is_used = false;                 // backward has it, and will release it
  bool is_given = false;                // with its memory
  std::optional<uint64_t> values = {};  // a hash, to compare with what is rebuilt
  int version = 0;                      // of which
};

}  // namespace snug::detail
