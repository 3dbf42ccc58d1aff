// Rematerialize and plan_activations: what goes to disk, and disks that fail.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/memory/operator_mode.h"
#include "src/planner/simulator.h"
#include "src/remat/op_tape.h"
#include "src/remat/profile_step.h"
#include "src/remat/tape_schedule.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/times_mask.h"

namespace snug::rematerialize_offload_test {
namespace {

using plan::keep_all;
using plan::Simulator;
using plan::Stay;
using plan::Stays;
using testing::error_of;
using testing::gradients;
using ::testing::HasSubstr;
using testing::number_of_models;
using testing::OneThread;
using testing::plan_of;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using testing::Step;
using testing::TemporaryFolder;
using testing::TimesMask;
using torch::Tensor;

OffloadLink link_to(const std::filesystem::path& directory) {
  return {.directory = directory.string(), .out_bytes_per_second = 1e9, .back_bytes_per_second = 2e9, .seconds = 1e-5};
}

Stays all_leaving(const plan::Profile& profile, Stay way) {
  Stays plan(profile.storages.size(), way);
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = profile.storages[s].bytes > 0 ? way : Stay::kept();
  }
  return plan;
}

Stays all_offloaded(const plan::Profile& profile) { return all_leaving(profile, Stay::offloaded()); }

TEST(Rematerialize, OffloadsAnyStorageOfRandomModelsToTheBitAndPredictsThePeakToTheByte) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const TemporaryFolder folder;
  int mixed = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const testing::Outcome plain = step.run(std::nullopt);
    step.reset();
    const Simulator simulator(detail::profile_step(step.forward(), {.link = link_to(folder.path())}));
    std::mt19937 random(static_cast<uint32_t>(seed));
    Stays choices = all_offloaded(simulator.profile());
    for (int trial = 0; trial < 4; ++trial) {
      const auto plan = plan_of(simulator, choices);
      ASSERT_TRUE(plan || trial > 1) << "everything may go";
      if (plan) {
        const testing::Outcome planned = step.run(plan);
        testing::expect_same(planned, plain);
        EXPECT_EQ(planned.peak_bytes, simulator.run(choices).peak_bytes) << trial;
        EXPECT_GT(plan->offloaded().bytes_out, 0);
        mixed += planned.replayed > 0 ? 1 : 0;
      }
      choices = all_leaving(simulator.profile(), Stay::streamed());
      for (size_t s = 0; s < choices.size() && trial > 0; ++s) {
        const bool may_leave = simulator.profile().storages[s].bytes > 0;
        const uint32_t choice = static_cast<uint32_t>(random()) % 8;
        choices[s] = choice < 3 && may_leave   ? Stay::streamed()
                     : choice < 5 && may_leave ? Stay::offloaded()
                     : choice == 6             ? Stay::once_rebuilt()
                     : choice == 7             ? Stay::never()
                                               : Stay::kept();
      }
    }
  }
  EXPECT_GT(mixed, 20);
}

TEST(Rematerialize, OffloadsForEachOfSeveralBackwardPassesThroughTheSameGraph) {
  const TemporaryFolder folder;
  const auto twice = [](const Tensor& loss) {
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const Simulator simulator(detail::profile_step(step.forward(), {.link = link_to(folder.path())}));
    for (const Stay way : {Stay::offloaded(), Stay::streamed()}) {
      const auto plan = plan_of(simulator, all_leaving(simulator.profile(), way));
      ASSERT_TRUE(plan.has_value());
      EXPECT_TRUE(same_bits(gradients(model, step, plan, twice), gradients(model, step, std::nullopt, twice)));
    }
  }
}

TEST(Rematerialize, StillHasWhatItOffloadsAndTheProgramDropsBetweenTwoBackwardPasses) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  Tensor received;
  const auto step = [&] {
    received = torch::empty({64, 64});
    std::fill_n(received.data_ptr<float>(), received.numel(), 0.5F);
    detail::report_unseen_write(received);  // it cannot be made again, and autograd does not save it
    return (weight.sigmoid() * received.exp()).sum();
  };
  const auto gradient = [&](const std::optional<ActivationPlan>& plan) {
    weight.mutable_grad() = Tensor();
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    const Tensor loss = step();
    scope.reset();
    loss.backward({}, /*retain_graph=*/true);
    received = Tensor();
    loss.backward();
    return weight.grad().clone();
  };
  const Simulator simulator(detail::profile_step(step, {.link = link_to(folder.path())}));
  Stays choices = keep_all(simulator.profile());
  for (size_t s = 0; s < choices.size(); ++s) {
    const std::string& name = simulator.profile().storages[s].name;
    choices[s] = name.starts_with("aten::empty") ? Stay::offloaded() : name == "aten::exp" ? Stay::never() : choices[s];
  }
  const auto plan = plan_of(simulator, choices);
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(torch::equal(gradient(plan), gradient(std::nullopt)));
}

TEST(PlanActivations, TrainsByOffloadingWhatNeitherFitsNorCanBeComputedAgain) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  constexpr int64_t kLayers = 12, kRows = 2048, kWidth = 32, kActivation = kRows * kWidth * 4;
  const Tensor input = torch::randn({kRows, kWidth});
  const Tensor weight = torch::rand({kWidth}, torch::requires_grad());
  const auto step = [&] {
    Tensor h = input * weight;
    for (int64_t i = 0; i < kLayers; ++i) {
      h = TimesMask::apply(h);
    }
    return h.sum();
  };
  step().backward();
  const Tensor plain = weight.grad();
  weight.mutable_grad() = Tensor();
  const TemporaryFolder folder;
  const Bytes budget(5 * kActivation);
  EXPECT_THROW(plan_activations(step, budget), BudgetExceeded);
  constexpr int64_t kForGenerators = 16384;  // their states, which planning puts back
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + budget.count() + kForGenerators));
  const ActivationPlan plan = plan_activations(step, budget, link_to(folder.path()));
  EXPECT_LE(plan.predicted_peak_bytes, budget.count());
  EXPECT_THAT(plan.explain(), HasSubstr("goes to disk:"));
  const MemoryMeter meter;
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = step();
  }
  loss.backward();
  EXPECT_EQ(meter.report().peak_bytes, plan.predicted_peak_bytes);
  EXPECT_TRUE(torch::equal(weight.grad(), plain));
  EXPECT_GE(plan.offloaded().bytes_back, (kLayers - 5) * kActivation);
}

TEST(Rematerialize, NoticesThatWhatItWouldOffloadWasWrittenInPlace) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  Tensor between;
  const auto step = [&] {
    between = weight.sigmoid();
    return between.exp().sum();
  };
  const Simulator simulator(detail::profile_step(step, {.link = link_to(folder.path())}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  Tensor loss;
  {
    const Rematerialize scope(*plan);
    loss = step();
  }
  between.detach().add_(1);
  EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Rematerialize, IsExplainedButNotRunWithoutTheDirectoryToOffloadTo) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const Simulator simulator(
      detail::profile_step([&] { return weight.sigmoid().exp().sum(); }, {.link = link_to(folder / "nowhere")}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  EXPECT_THAT(plan->explain(), HasSubstr("goes to disk:"));
  EXPECT_EQ(plan->offloaded().bytes_out, 0) << "which makes no file";
  EXPECT_THAT(error_of<Error>([&] { const Rematerialize scope(*plan); }), HasSubstr("nowhere"));
}

// So that what was promised when the scope began does not come up, or get lost, in the middle of a forward pass.
TEST(Rematerialize, LooksForTheTemporaryDirectoryAtOnce) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const Simulator simulator(detail::profile_step([&] { return weight.sigmoid().exp().sum(); }, {.link = link_to({})}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  const char* const before = std::getenv("TMPDIR");
  const std::optional<std::string> kept = before == nullptr ? std::nullopt : std::optional<std::string>(before);
  ::setenv("TMPDIR", (folder / "nowhere").c_str(), 1);
  EXPECT_THAT(error_of<Error>([&] { const Rematerialize scope(*plan); }), HasSubstr("temporary directory"));
  kept ? ::setenv("TMPDIR", kept->c_str(), 1) : ::unsetenv("TMPDIR");
}

// --- disks that fail

struct Faults final : detail::SpillCalls {
  std::atomic<bool> writes_fail{false}, reads_fail{false};
  std::atomic<int> truncations{0};

  ssize_t pwrite(int file, const void* data, size_t size, off_t offset) override {
    errno = ENOSPC;
    return writes_fail ? -1 : SpillCalls::pwrite(file, data, size, offset);
  }
  ssize_t pread(int file, void* data, size_t size, off_t offset) override {
    errno = EIO;
    return reads_fail ? -1 : SpillCalls::pread(file, data, size, offset);
  }
  int ftruncate(int file, off_t size) override {
    ++truncations;
    return SpillCalls::ftruncate(file, size);
  }
};

struct ThrowingStore final : detail::OffloadStore {
  std::unique_ptr<detail::StoredAway> store(const c10::Storage&) override { throw std::runtime_error("no thread"); }
  SaveOnHost::Report transfers() const override { return {}; }
};

// A step whose masks cannot be made again, under a plan that offloads all that backward needs, to a store that is
// given.
class OffloadedStep {
 public:
  explicit OffloadedStep(Stay way) : way_(way) {}

  Tensor forward() const {
    Tensor h = input_ * weight_;
    for (int i = 0; i < 6; ++i) {
      h = TimesMask::apply(h.sigmoid());
    }
    return h.sum();
  }

  Tensor forward_to(const std::shared_ptr<detail::OffloadStore>& store) const {
    const Stays choices = all_leaving(simulator_.profile(), way_);
    const auto tape = std::make_shared<detail::OpTape>(std::make_shared<const detail::TapeSchedule>(
        detail::make_schedule(simulator_.profile(), choices, simulator_.run(choices), store)));
    Tensor loss;
    {
      const detail::PolicyScope saved(tape);
      const detail::OperatorScope operators(*tape);
      loss = forward();
    }
    tape->close();
    EXPECT_EQ(tape->deviation(), "");
    return loss;
  }

  std::shared_ptr<detail::OffloadStore> store_on(Faults& faults) const {
    return detail::make_spill_store({.directory = folder_.path()}, faults);
  }

  // Of one backward pass, and how far memory rose in it and in the forward pass.
  Tensor gradient(const std::function<Tensor()>& loss, int64_t* peak = nullptr) {
    weight_.mutable_grad() = Tensor();
    const MemoryMeter meter;
    loss().backward();
    if (peak != nullptr) {
      *peak = meter.report().peak_bytes;
    }
    return weight_.grad().clone();
  }
  Tensor plain_gradient() {
    return gradient([&] { return forward(); });
  }

  const Simulator& simulator() const { return simulator_; }

 private:
  Stay way_;
  OneThread scratch_of_several_threads_overlaps_by_chance_;
  TemporaryFolder folder_;
  Tensor input_ = torch::randn({256, 32});
  Tensor weight_ = torch::rand({32}, torch::requires_grad());
  Simulator simulator_{detail::profile_step([this] { return forward(); }, {.link = link_to(folder_.path())})};
};

class RematerializeOnAFailingDisk : public ::testing::TestWithParam<Stay> {};
INSTANTIATE_TEST_SUITE_P(Ways, RematerializeOnAFailingDisk, ::testing::Values(Stay::offloaded(), Stay::streamed()),
                         [](const auto& way) { return way.param == Stay::streamed() ? "Streamed" : "Offloaded"; });

TEST_P(RematerializeOnAFailingDisk, KeepsOnceAndUntilItsLastUseWhatAFullDiskDoesNotTake) {
  OffloadedStep step(GetParam());
  Faults faults;
  const auto store = step.store_on(faults);
  faults.writes_fail = true;
  int64_t peak = 0;
  const Tensor gradient = step.gradient([&] { return step.forward_to(store); }, &peak);
  EXPECT_TRUE(torch::equal(gradient, step.plain_gradient()));
  EXPECT_EQ(peak, step.simulator().run(keep_all(step.simulator().profile())).peak_bytes) << "that of plain training";
  const SaveOnHost::Report report = store->report();
  EXPECT_GE(report.failed_writes, 6);
  EXPECT_EQ(report.bytes_out, 0);
  EXPECT_THAT(report.failure, HasSubstr("No space left on device"));
}

TEST_P(RematerializeOnAFailingDisk, CountsWhatStaysInMemoryBecauseOfAnException) {
  OffloadedStep step(GetParam());
  const auto store = std::make_shared<ThrowingStore>();
  EXPECT_TRUE(torch::equal(step.gradient([&] { return step.forward_to(store); }), step.plain_gradient()));
  const SaveOnHost::Report report = store->report();
  EXPECT_GE(report.failed_writes, 6);
  EXPECT_GT(report.bytes_kept, 0);
  EXPECT_EQ(report.failure, "no thread");
}

TEST_P(RematerializeOnAFailingDisk, ThrowsInBackwardWhatCannotBeReadBack) {
  OffloadedStep step(GetParam());
  Faults faults;
  const auto store = step.store_on(faults);
  const Tensor loss = step.forward_to(store);
  faults.reads_fail = true;
  EXPECT_THAT(error_of<Error>([&] { loss.backward(); }), HasSubstr("Input/output error"));
}

TEST_P(RematerializeOnAFailingDisk, GivesMemoryAndFileBackWhenAGraphIsDroppedWithoutBackward) {
  OffloadedStep step(GetParam());
  Faults faults;
  const auto store = step.store_on(faults);
  const Bytes before = live_bytes(torch::kCPU);
  Tensor loss = step.forward_to(store);
  EXPECT_GT(store->report().bytes_out, 0);
  EXPECT_EQ(faults.truncations, 0);
  loss = Tensor();
  EXPECT_EQ(live_bytes(torch::kCPU), before);
  while (faults.truncations == 0) {  // by the file's thread, when nothing is left in it
    std::this_thread::yield();
  }
}

// The thread of SaveOnHost drops storages, which then come back to the tape, while forward goes on.
TEST(Rematerialize, OffloadsWhatASaveOnHostInsideHasLetGoOf) {
  const TemporaryFolder folder;
  const Tensor input = torch::randn({64, 16});
  const Tensor weight = torch::rand({16}, torch::requires_grad());
  const auto step = [&](bool is_inside) {
    Tensor h = input * weight;
    for (int layer = 0; layer < 60; ++layer) {
      std::optional<SaveOnHost> inside;
      if (is_inside && layer % 3 > 0) {
        inside.emplace(OffloadOptions{.min_bytes = Bytes(1), .directory = folder.path()});
      }
      h = (h.sigmoid() * h).exp().tanh();
    }
    return h.sum();
  };
  const Simulator simulator(detail::profile_step([&] { return step(false); }, {.link = link_to(folder.path())}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  weight.mutable_grad() = Tensor();
  step(false).backward();
  const Tensor plain = weight.grad();
  for (int round = 0; round < 10; ++round) {
    weight.mutable_grad() = Tensor();
    Tensor loss;
    {
      const Rematerialize scope(*plan);
      loss = step(true);
      EXPECT_EQ(scope.deviation(), "");
    }
    loss.backward();
    ASSERT_TRUE(torch::equal(weight.grad(), plain)) << round;
  }
  EXPECT_GT(plan->offloaded().bytes_out, 0);
}

TEST(MeasureOffloadLink, FindsSpeedsWithoutTakingTensorMemory) {
  const TemporaryFolder folder;
  const MemoryMeter meter;
  const OffloadLink link = measure_offload_link(folder.path());
  EXPECT_TRUE(link.is_open());
  EXPECT_EQ(link.directory, folder.path().string());
  EXPECT_EQ(meter.report().peak_bytes, 0);
  EXPECT_EQ(measure_offload_link().directory, std::filesystem::temp_directory_path().string());
  EXPECT_THAT(error_of<Error>([&] { measure_offload_link(folder / "nowhere"); }), HasSubstr("nowhere"));
}

}  // namespace
}  // namespace snug::rematerialize_offload_test
