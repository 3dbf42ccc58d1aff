#pragma once
// The files that with_models.py made: exported models, their inputs, and the results of training them in Python.

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/exported/exported_module.h"
#include "snug/safetensors.h"

namespace snug::testing {

/// The folder with the models; empty if the program was started without with_models.py.
inline std::filesystem::path exported_models() {
  const char* folder = std::getenv("SNUG_EXPORTED_MODELS");  // NOLINT(concurrency-mt-unsafe)
  return folder == nullptr ? "" : folder;
}

/// A model, and all that Python has to say about it: "same.input0.1", "other.loss3".
struct ExportedCase {
  explicit ExportedCase(const std::string& name)
      : file(exported_models() / (name + ".pt2")),
        known(load_safetensors(exported_models() / (name + ".safetensors"))),
        model(load_exported(file)) {}

  std::vector<at::Tensor> inputs(int step, const std::string& batches = "same") const {
    const std::string key = batches + ".input" + std::to_string(step) + ".";
    return {known.at(key + "0"), known.at(key + "1")};
  }

  std::filesystem::path file;
  std::map<std::string, at::Tensor> known;
  std::shared_ptr<ExportedModule> model;
};

/// Skips where there are no models.
class WithExportedModels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (exported_models().empty()) {
      GTEST_SKIP() << "needs tests/exported/with_models.py";
    }
    at::set_num_threads(2);  // Python's
  }
};

}  // namespace snug::testing
