#pragma once
// Nodes of the graph that are the program's own functions, in C++ or in Python.

#include <cstring>
#include <typeinfo>

#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// Whether the node is a custom function. For nodes in C++, LibTorch's is_traceable() gives the answer. A node in
/// Python looks for an attribute with the name is_traceable in the node's class. Few classes have the attribute, and
/// without the attribute the node throws Python's error. So a node in Python is recognised by the node's type, which
/// only Python's headers declare.
inline bool is_custom_function(torch::autograd::Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0 || !node.is_traceable();
}

}  // namespace snug::detail
