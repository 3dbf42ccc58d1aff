#pragma once
// A StateDict as named tensors and one JSON text, and back. The conversion is exact in order, types, and doubles to the
// bit.
//
//   {"step": 12, "lr": 0.1, "on": true, "name": "adam", "exp_avg": null, "scaler": {...}}
//
// null represents a tensor; the tensor's name is the path to null, joined by dots. A double that JSON cannot represent
// (NaN, infinities) is written as its bits: ["double", "7ff0000000000000"].

#include <map>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>

#include "snug/state.h"

namespace snug::detail {

struct FlatState {
  std::map<std::string, at::Tensor> tensors;
  std::string structure;  // the JSON
};

/// Throws ConfigError, naming the entry, for two tensors with equal joined names, text other than UTF-8, and
/// dictionaries more than 100 deep. `where` opens messages.
FlatState flatten(const StateDict& state, const std::string& where);

/// The names of the tensors that `structure` refers to. Throws CorruptFile if flatten cannot have written it.
std::set<std::string> tensor_names(const std::string& structure, const std::string& where);

/// Undoes flatten. Throws CorruptFile for a bad structure and for missing tensors.
StateDict unflatten(const std::string& structure, const std::map<std::string, at::Tensor>& tensors,
                    const std::string& where);

}  // namespace snug::detail
