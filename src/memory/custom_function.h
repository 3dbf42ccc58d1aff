#pragma once
// Nodes of the graph that are functions of the program's own, in C++ or in Python.

#include <cstring>
#include <typeinfo>

#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// LibTorch's is_traceable() tells it of nodes in C++. A node in Python looks for an attribute of that name in its
/// class, which few classes have, and throws Python's error. So it is known by its type, which only Python's headers
/// declare.
inline bool is_custom_function(torch::autograd::Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0 || !node.is_traceable();
}

}  // namespace snug::detail
