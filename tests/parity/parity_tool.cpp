// What the Python scripts beside this file need from snug, one thing per call:
//
//   parity_tool write-tensors FILE     every dtype and a few shapes, with values the scripts know
//   parity_tool check-tensors FILE     fails unless the file holds just these tensors
//   parity_tool copy FROM TO           loads a file and saves it again
//   parity_tool write-gpt FOLDER       a snapshot of a Gpt, and tokens and logits in example.safetensors

#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/safetensors.h"
#include "snug/snapshot.h"

namespace {

using Tensors = std::map<std::string, torch::Tensor>;

Tensors known_tensors() {
  const auto count = torch::arange(6, torch::kLong).view({2, 3});
  Tensors tensors{{"bool", count.remainder(2).to(torch::kBool)},
                  {"scalar", torch::scalar_tensor(2.5)},
                  {"empty", torch::empty({3, 0})},
                  {"transposed", count.to(torch::kFloat).t()}};
  const std::vector<std::pair<const char*, torch::Dtype>> dtypes{{"uint8", torch::kUInt8},
                                                                 {"int8", torch::kInt8},
                                                                 {"int16", torch::kInt16},
                                                                 {"int32", torch::kInt32},
                                                                 {"int64", torch::kInt64},
                                                                 {"uint16", at::kUInt16},
                                                                 {"uint32", at::kUInt32},
                                                                 {"uint64", at::kUInt64},
                                                                 {"float16", torch::kFloat16},
                                                                 {"float32", torch::kFloat32},
                                                                 {"float64", torch::kFloat64},
                                                                 {"bfloat16", torch::kBFloat16},
                                                                 {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                                 {"float8_e5m2", at::kFloat8_e5m2},
                                                                 {"complex64", torch::kComplexFloat}};
  for (const auto& [name, dtype] : dtypes) {
    tensors[name] = count.to(dtype);
  }
  return tensors;
}

void check_tensors(const std::string& file) {
  const Tensors expected = known_tensors();
  const Tensors found = snug::load_safetensors(file);
  if (found.size() != expected.size()) {
    throw std::runtime_error(fmt::format("{} tensors instead of {}", found.size(), expected.size()));
  }
  for (const auto& [name, tensor] : expected) {
    const auto& other = found.at(name);
    if (other.scalar_type() != tensor.scalar_type() || other.sizes() != tensor.sizes() ||
        !torch::equal(other.to(torch::kComplexDouble), tensor.to(torch::kComplexDouble))) {
      throw std::runtime_error("another dtype, shape or value: " + name);
    }
  }
}

// Weights far from their initial values, so that no bias, norm or scale goes unnoticed.
void write_gpt(const std::string& folder) {
  torch::manual_seed(11);
  const torch::NoGradGuard no_grad;
  snug::Gpt model(snug::GptOptions{.vocab = 50, .context = 16, .layers = 3, .heads = 4, .width = 32, .mlp_ratio = 3});
  for (torch::Tensor& parameter : model->parameters()) {
    parameter.add_(torch::randn_like(parameter), 0.1);
  }
  const auto tokens = torch::randint(50, {4, 13});
  snug::SnapshotStore(folder).save(1, {{"model", snug::stateful(model)}});
  snug::save_safetensors(folder + "/example.safetensors", {{"tokens", tokens}, {"logits", model->forward(tokens)}});
}

int run(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "" : arguments[0];
  if (command == "write-tensors" && arguments.size() == 2) {
    snug::save_safetensors(arguments[1], known_tensors(), {{"format", "pt"}});
  } else if (command == "check-tensors" && arguments.size() == 2) {
    check_tensors(arguments[1]);
  } else if (command == "copy" && arguments.size() == 3) {
    snug::save_safetensors(arguments[2], snug::load_safetensors(arguments[1]),
                           snug::read_safetensors_metadata(arguments[1]));
  } else if (command == "write-gpt" && arguments.size() == 2) {
    write_gpt(arguments[1]);
  } else {
    std::fputs("usage: see the first lines of parity_tool.cpp\n", stderr);
    return 2;
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "parity_tool: %s\n", error.what());
    return 1;
  }
}
