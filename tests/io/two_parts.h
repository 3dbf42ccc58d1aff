#pragma once
// Something to save and load: two parts of a run that must always be of the same step.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "snug/snapshot.h"
#include "src/core/file_system.h"

namespace snug::testing {

// A part that holds one number and one tensor, both saying the step they are of.
struct Counter {
  int64_t step = 0;
  at::Tensor tensor = at::zeros({4});
  int64_t loads = 0;

  void set(int64_t value) {
    step = value;
    tensor = at::full({4}, value, at::kFloat);
  }
  bool is(int64_t value) const { return step == value && at::equal(tensor, at::full({4}, value, at::kFloat)); }
  Stateful stateful() {
    return {[this] {
              StateDict state;
              state.set("step", step);
              state.set("tensor", tensor);
              return state;
            },
            [this](const StateDict& state) {
              ++loads;
              step = state.get<int64_t>("step");
              tensor = state.get<at::Tensor>("tensor").clone();
            }};
  }
};

// Two such parts, which must always be of the same step.
struct TwoParts {
  Counter model;
  Counter optimizer;

  std::map<std::string, Stateful> parts() { return {{"model", model.stateful()}, {"optimizer", optimizer.stateful()}}; }
  void set(int64_t step) {
    model.set(step);
    optimizer.set(step);
  }
  bool is(int64_t step) const { return model.is(step) && optimizer.is(step); }
};

inline void save(SnapshotStore& store, int64_t step) {
  TwoParts two;
  two.set(step);
  store.save(step, two.parts());
}

// What a new process would find: the step, after checking that all parts are of it.
inline std::optional<int64_t> load(const std::filesystem::path& directory) {
  TwoParts two;
  const auto step = SnapshotStore(directory).load_latest(two.parts());
  EXPECT_TRUE(two.is(step.value_or(0)));
  return step;
}

inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  return detail::FileSystem::real().list(directory);
}

// One Stateful that gives `state` and keeps what it is loaded with.
inline Stateful holding(StateDict& state) {
  return {[&] { return state; }, [&](const StateDict& loaded) { state = loaded; }};
}

}  // namespace snug::testing
