#include "src/exported/program.h"

#include <utility>

#include <fmt/format.h>

#include "src/core/parse_json.h"
#include "src/exported/graph_reader.h"
#include "src/exported/interpreter.h"

namespace snug::detail {
namespace {

using Input = ExportedProgram::Input;

void check_version(const ExportJson& json) {
  constexpr int kSchema = 8;
  const ExportJson& version = json.at("schema_version");
  if (version.at("major") != kSchema) {
    throw ConfigError(fmt::format("its schema is {}, of torch {}; only {} is known, of torch 2.11 to 2.15",
                                  version.at("major").dump(), json.value("torch_version", "unknown"), kSchema));
  }
  if (const ExportJson& verifiers = json.at("verifiers"); verifiers != ExportJson::array({"TRAINING"})) {
    throw ConfigError(
        "it is for inference: run_decompositions() rewrote it; save the program that torch.export.export returned");
  }
}

// The name of an input's parameter, buffer or constant; null for other inputs.
const ExportJson* tensor_name(const UnionJson& input) {
  const auto found = input.kind == "custom_obj" ? input.value.end() : input.value.find(input.kind + "_name");
  return found == input.value.end() ? nullptr : &*found;
}

// Each program has its own numbers for constants; all programs share the model's parameters and buffers.
std::string key_of(const std::string& program, const std::string& kind, const std::string& name) {
  return kind == "tensor_constant" ? program + "/" + name : name;
}

std::vector<TensorAtExport> tensors_of(const std::string& program, const ExportJson& specs, const ExportJson& metas) {
  std::vector<TensorAtExport> result;
  for (const ExportJson& spec : specs) {
    const UnionJson input = union_of(spec);
    if (const ExportJson* name = tensor_name(input)) {
      result.push_back({.name = name->get<std::string>(),
                        .key = key_of(program, input.kind, name->get<std::string>()),
                        .is_parameter = input.kind == "parameter",
                        .is_persistent = input.value.value("persistent", false),
                        .meta = metas.at(input.value.at("arg").at("name").get<std::string>())});
    }
  }
  return result;
}

void read_inputs(const std::string& name_of_program, const ExportJson& specs, const ExportJson& metas,
                 const ExportedTensors& tensors, ExportedProgram& program) {
  for (const ExportJson& spec : specs) {
    const UnionJson input = union_of(spec);
    if (const ExportJson* name = tensor_name(input)) {
      const auto kind = input.kind == "parameter" ? Input::Kind::Parameter : Input::Kind::Buffer;
      program.inputs.push_back(
          {.kind = kind, .tensor = tensors.all.at(key_of(name_of_program, input.kind, name->get<std::string>()))});
    } else if (input.kind == "user_input") {
      program.given.push_back(read_input(input.value.at("arg"), metas));
      program.inputs.push_back({});
    } else if (input.kind == "constant_input") {
      program.inputs.push_back({.kind = Input::Kind::Constant, .tensor = {}});
    } else {
      throw ConfigError(fmt::format("an input of the kind '{}' is not supported", input.kind));
    }
  }
}

// The names of the leaves of Python's result: the keys and indices on the path to a leaf, "loss" or "0.hidden".
void append_names(const ExportJson& tree, const std::string& path, std::vector<std::string>& names) {
  const ExportJson& children = tree.at("children_spec");
  if (tree.at("type").is_null()) {
    names.push_back(path.empty() ? "output" : path);
    return;
  }
  const bool is_dict = tree.at("type") == "builtins.dict";
  const ExportJson keys = is_dict ? ExportJson::parse(tree.at("context").get<std::string>()) : ExportJson();
  for (size_t i = 0; i < children.size(); ++i) {
    const std::string key = is_dict && keys.at(i).is_string() ? keys.at(i).get<std::string>() : std::to_string(i);
    append_names(children.at(i), path.empty() ? key : path + "." + key, names);
  }
}

std::vector<std::string> read_output_names(const ExportJson& graph_module) {
  for (const ExportJson& output : graph_module.at("signature").at("output_specs")) {
    if (union_of(output).kind != "user_output") {
      throw ConfigError(fmt::format("an output of the kind '{}' is not supported", union_of(output).kind));
    }
  }
  const std::string text = graph_module.at("module_call_graph").at(0).at("signature").at("out_spec");
  std::vector<std::string> names;
  append_names(parse_json<ExportJson>(text).at(1), "", names);
  return names;
}

}  // namespace

std::unique_ptr<ExportedProgram> read_program(const ZipArchive& archive, const std::string& name,
                                              torch::nn::Module& root, ExportedTensors& tensors) {
  const ExportJson json = read_json(archive, "models/" + name + ".json");
  check_version(json);
  const ExportJson& graph_module = json.at("graph_module");
  const ExportJson &graph = graph_module.at("graph"), &specs = graph_module.at("signature").at("input_specs"),
                   &metas = graph.at("tensor_values");
  auto program = std::make_unique<ExportedProgram>();
  program->graph = read_graph(graph);
  program->ranges = read_ranges(json.at("range_constraints"));
  program->output_names = read_output_names(graph_module);
  program->home = read_weights(archive, name, tensors_of(name, specs, metas), root, tensors);
  read_inputs(name, specs, metas, tensors, *program);
  if (program->inputs.size() != program->graph->inputs.size() ||
      program->output_names.size() != program->graph->outputs.size()) {
    throw CorruptFile(fmt::format("the graph has {} inputs and {} outputs, its signature {} and {}",
                                  program->graph->inputs.size(), program->graph->outputs.size(), program->inputs.size(),
                                  program->output_names.size()));
  }
  return program;
}

std::vector<c10::IValue> ExportedProgram::run(std::vector<c10::IValue> values, bool autocast_cache) const {
  check_inputs(given, ranges, values);
  std::vector<c10::IValue> all;
  size_t next = 0;
  c10::Device here = home;
  for (const Input& input : inputs) {
    const bool is_given = input.kind == Input::Kind::Given;
    here = input.kind == Input::Kind::Parameter ? input.tensor.device() : here;
    all.push_back(is_given                              ? std::move(values[next++])
                  : input.kind == Input::Kind::Constant ? c10::IValue()
                                                        : c10::IValue(input.tensor));
  }
  auto outputs = Interpreter{home, here, autocast_cache}.run(*graph, std::move(all));
  for (const Input& input : inputs) {
    if (input.kind == Input::Kind::Buffer && input.tensor.requires_grad()) {
      input.tensor.detach_();
      throw Error(
          "ExportedModule: a buffer got a gradient, as torch.export forgets torch.no_grad() inside torch.autocast; "
          "in the Python model, put the "
          "autocast inside, or use detach()");
    }
  }
  return outputs;
}

}  // namespace snug::detail
