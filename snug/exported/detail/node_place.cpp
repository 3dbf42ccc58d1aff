#include "snug/exported/detail/node_place.h"

#include <fmt/format.h>

namespace snug::detail {
namespace {

// Of "key,path,type;key,path,type" the path of the innermost module.
std::string layer_of(const std::string& modules) {
  const std::string innermost = modules.substr(modules.rfind(';') + 1);
  const size_t first = innermost.find(','), last = innermost.rfind(',');
  return first == last ? "" : innermost.substr(first + 1, last - first - 1);
}

// The innermost frame of a traceback, without its source.
std::string line_of(const std::string& traceback) {
  const size_t begin = traceback.rfind("File \"");
  return begin == std::string::npos ? "" : traceback.substr(begin, traceback.find('\n', begin) - begin);
}

}  // namespace

std::string place_of_node(const ExportJson& node) {
  const ExportJson metadata = node.value("metadata", ExportJson::object());
  const std::string layer = layer_of(metadata.value("nn_module_stack", "")),
                    line = line_of(metadata.value("stack_trace", ""));
  return fmt::format(" [in {}{}{}]", node.at("target").get<std::string>(), layer.empty() ? "" : ", layer " + layer,
                     line.empty() ? "" : ", from " + line);
}

}  // namespace snug::detail
