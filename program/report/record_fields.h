#pragma once
// The fields of a step's record, in one list, for writing and reading the run log and for TensorBoard.

#include <concepts>
#include <type_traits>

#include "program/report/run_log.h"

namespace snug::detail {

struct RecordField {
  const char* name;           ///< in a line of the run log
  const char* tag = nullptr;  ///< in TensorBoard, which groups by the part before the slash; null: not shown by itself
};

/// A structure of fields, as opposed to one value.
template <class T>
concept FieldGroup = std::same_as<T, StepRecord> || std::same_as<T, MemoryByCategory> || std::same_as<T, Communication>;

/// Calls `visit(field, member)` for each field of a group, which may be const, in the order of a line of the run log.
template <class Group, class Visit>
  requires FieldGroup<std::remove_const_t<Group>>
void visit_fields(Group& group, Visit&& visit) {
  if constexpr (std::same_as<std::remove_const_t<Group>, StepRecord>) {
    visit(RecordField{"step"}, group.step);
    visit(RecordField{"loss", "loss/training"}, group.loss);
    visit(RecordField{"validation_loss", "loss/held_out"}, group.validation_loss);
    visit(RecordField{"learning_rate", "training/learning_rate"}, group.learning_rate);
    visit(RecordField{"grad_norm", "training/gradient_norm"}, group.grad_norm);
    visit(RecordField{"gradient_noise_scale", "training/gradient_noise_scale"}, group.gradient_noise_scale);
    visit(RecordField{"loss_scale", "training/loss_scale"}, group.loss_scale);
    visit(RecordField{"stepped", "training/skipped"}, group.stepped);
    visit(RecordField{"items", "training/items"}, group.items);
    visit(RecordField{"micro_batches", "training/micro_batches"}, group.micro_batches);
    visit(RecordField{"peak_bytes", "bytes/peak"}, group.peak_bytes);
    visit(RecordField{"activation_peak_bytes", "bytes/activation_peak"}, group.activation_peak_bytes);
    visit(RecordField{"memory"}, group.memory);
    visit(RecordField{"communication"}, group.communication);
    visit(RecordField{"seconds", "speed/seconds"}, group.seconds);
    visit(RecordField{"items_per_second", "speed/items_per_second"}, group.items_per_second);
  } else if constexpr (std::same_as<std::remove_const_t<Group>, MemoryByCategory>) {
    visit(RecordField{"parameters", "bytes/parameters"}, group.parameters);
    visit(RecordField{"gradients", "bytes/gradients"}, group.gradients);
    visit(RecordField{"optimizer_state", "bytes/optimizer_state"}, group.optimizer_state);
    visit(RecordField{"activations", "bytes/activations"}, group.activations);
    visit(RecordField{"workspace", "bytes/workspace"}, group.workspace);
    visit(RecordField{"other", "bytes/other"}, group.other);
  } else {
    visit(RecordField{"bytes_sent", "communication/bytes_sent"}, group.bytes_sent);
    visit(RecordField{"seconds", "communication/seconds"}, group.seconds);
    visit(RecordField{"waited", "communication/waited"}, group.waited);
  }
}

}  // namespace snug::detail
