#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/snapshot.h"
#include "snug/step_in_backward.h"
#include "src/core/spill_disk.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/optimizer_kinds.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

// An optimizer whose state is in a file is the same optimizer: to the bit, under scalers, after failures, in snapshots.

namespace snug::state_in_file_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::FileSizeLimit;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::is_in_file;
using testing::Kind;
using testing::kind;
using testing::kinds;
using testing::parameters_for;
using testing::same_bits;
using testing::set_gradients;
using testing::TemporaryFolder;
using testing::tensors_in;
using testing::train;
using testing::Training;
using torch::Tensor;

const Bytes kSmallWindow(192 << 10);  // so that parameters of 100,000 elements are cut into many pieces

class StateInFile : public ::testing::TestWithParam<Kind> {
 protected:
  StateFile file(Bytes window = kSmallWindow) const { return {.directory = folder.path(), .window = window}; }
  TemporaryFolder folder;
};
INSTANTIATE_TEST_SUITE_P(Of, StateInFile, ::testing::ValuesIn(kinds()),
                         [](const auto& param_info) { return param_info.param.name; });

TEST_P(StateInFile, HasTheBitsOfStateInMemoryOverFiftySteps) {
  Training memory(GetParam()), outside(GetParam(), file()), in_one_block(GetParam(), file(Bytes(64 << 20)));
  for (uint64_t step = 1; step <= 50; ++step) {
    for (Training* training : {&memory, &outside, &in_one_block}) {
      set_gradients(training->parameters, step);
      training->parameters[step % training->parameters.size()].mutable_grad().reset();  // some steps are without
      training->optimizer->step();
    }
    if (step == 1 || step % 10 == 0) {
      ASSERT_TRUE(same_bits(outside.all(), memory.all())) << "step " << step;
      ASSERT_TRUE(same_bits(in_one_block.all(), memory.all())) << "step " << step;
    }
  }
}

TEST_P(StateInFile, HasTheBitsOfStateInMemoryUnderAScalerThatSkips) {
  if (GetParam().dtype == torch::kHalf) {
    GTEST_SKIP() << "a GradScaler does not unscale FP16";
  }
  Training memory(GetParam()), outside(GetParam(), file());
  for (Training* training : {&memory, &outside}) {
    training->scaled_steps();
  }
  EXPECT_TRUE(same_bits(outside.all(), memory.all()));
}

TEST_P(StateInFile, MovesThereAndBackBetweenSteps) {
  Training memory(GetParam()), moved(GetParam());
  memory.steps(1, 9);
  moved.steps(1, 3);
  moved.optimizer->keep_state_in(file());
  EXPECT_TRUE(is_in_file(*moved.optimizer));
  moved.steps(4, 5);
  moved.optimizer->keep_state_in(file(Bytes(1 << 20)));  // with other pieces
  moved.steps(6, 7);
  moved.optimizer->keep_state_in(StateOnDevice());
  EXPECT_FALSE(is_in_file(*moved.optimizer));
  moved.steps(8, 9);
  EXPECT_TRUE(same_bits(moved.all(), memory.all()));
}

// In memory and in a file alike: all of it or nothing.
TEST_P(StateInFile, AStateDictShowsTheStateOfNowUntilItMovesAndThenStaysAsItIs) {
  for (const bool is_in_file : {false, true}) {
    Training training(GetParam());
    if (is_in_file) {
      training.optimizer->keep_state_in(file());
    }
    training.steps(1, 2);
    const StateDict kept = training.optimizer->state_dict();
    training.steps(3, 5);
    const auto now = tensors_in(training.optimizer->state_dict());
    EXPECT_TRUE(same_bits(tensors_in(kept), now)) << is_in_file;
    if (is_in_file) {
      training.optimizer->keep_state_in(StateOnDevice());
    } else {
      training.optimizer->keep_state_in(file());
    }
    training.steps(6, 7);
    EXPECT_TRUE(same_bits(tensors_in(kept), now)) << is_in_file;
    training.optimizer->load_state_dict(kept);
    EXPECT_TRUE(same_bits(tensors_in(training.optimizer->state_dict()), now)) << is_in_file;
  }
}

// As in a loop with a new optimizer each epoch.
TEST_P(StateInFile, StateThatIsClearedTakesNoRoomAndStaysInEarlierStateDicts) {
  struct Ends final : detail::SpillCalls {
    int64_t end = 0;  // of the room that was taken last
    int posix_fallocate(int of, off_t offset, off_t size) override {
      end = offset + size;
      return SpillCalls::posix_fallocate(of, offset, size);
    }
  } ends;
  Training memory(GetParam()), outside(GetParam());
  outside.optimizer->keep_state_in(file(), ends);
  for (Training* training : {&memory, &outside}) {
    training->steps(1, 2);
  }
  const int64_t end = ends.end;
  const StateDict before = outside.optimizer->state_dict();
  const auto state_before = clones_of(tensors_in(before));
  for (Training* training : {&memory, &outside}) {
    training->optimizer->state().clear();
    training->steps(3, 4);
  }
  EXPECT_TRUE(same_bits(outside.all(), memory.all()));
  EXPECT_EQ(ends.end, end);
  EXPECT_TRUE(same_bits(tensors_in(before), state_before));
}

TEST(StateInFileOfAdamW, StaysInTheDirectoryOfTheCallWhereTheProgramGoesToAnother) {
  const TemporaryFolder folder, elsewhere;
  const auto before = std::filesystem::current_path();
  const auto parameters = parameters_for(kinds().front());
  AdamW optimizer(parameters);
  std::filesystem::current_path(folder.path());
  std::filesystem::create_directory("state");
  optimizer.keep_state_in(StateFile{.directory = "state"});
  std::filesystem::current_path(elsewhere.path());
  train(optimizer, parameters, 1, 2);
  EXPECT_NO_THROW(optimizer.load_state_dict(optimizer.state_dict())) << "which makes a new file";
  std::filesystem::current_path(before);
}

TEST_P(StateInFile, IsLoadedFromStateInMemoryAndBack) {
  Training memory(GetParam());
  memory.steps(1, 3);
  Training outside(GetParam(), file()), back(GetParam());
  const auto hand_over = [](const Training& from, Training& to) {
    for (size_t i = 0; i < from.parameters.size(); ++i) {
      to.parameters[i].detach().copy_(from.parameters[i].detach());
    }
    to.optimizer->load_state_dict(from.optimizer->state_dict());
    EXPECT_TRUE(same_bits(to.all(), from.all()));
  };
  hand_over(memory, outside);
  outside.steps(4, 5);
  hand_over(outside, back);
  back.steps(6, 7);
  memory.steps(4, 7);
  EXPECT_TRUE(same_bits(back.all(), memory.all()));
}

TEST_P(StateInFile, TakesAsMuchMemoryAsItSaysItWill) {
  Training outside(GetParam(), file());
  for (const Tensor& parameter : outside.parameters) {
    parameter.mutable_grad() = torch::ones_like(parameter);  // in its layout, so that no copy is made
  }
  const int64_t before = live_bytes(torch::kCPU).count();
  const int64_t foretold =
      outside.optimizer->state_bytes_to_come() + outside.optimizer->bytes_with_state_in(file()).workspace;
  int64_t peak = 0;
  {
    const MemoryMeter meter;
    outside.optimizer->step();
    peak = meter.report().peak_bytes;
  }
  EXPECT_LE(peak, foretold);
  EXPECT_GE(peak, foretold * 9 / 10 - 64) << "SGD without momentum has no state";
  EXPECT_LE(foretold, kSmallWindow.count() + (8 << 10));
  EXPECT_LE(live_bytes(torch::kCPU).count() - before, 64) << "scalars stay";
}

// --- failures

// The `fail_at`-th call fails, of reads, writes and reservations together; from 1.
class Faults final : public detail::SpillCalls {
 public:
  std::atomic<int> calls{0}, fail_at{0};
  std::atomic<bool> kill{false};

  ssize_t pwrite(int file, const void* data, size_t size, off_t offset) override {
    return fails() ? -1 : SpillCalls::pwrite(file, data, size, offset);
  }
  ssize_t pread(int file, void* data, size_t size, off_t offset) override {
    return fails() ? -1 : SpillCalls::pread(file, data, size, offset);
  }
  int posix_fallocate(int file, off_t offset, off_t size) override {
    return fails() ? ENOSPC : SpillCalls::posix_fallocate(file, offset, size);
  }

 private:
  bool fails() {
    if (++calls != fail_at) {
      return false;
    }
    if (kill) {
      std::raise(SIGKILL);
    }
    errno = EIO;
    return true;
  }
};

TEST_P(StateInFile, IsUnchangedOrRefusesToGoOnWhicheverCallFails) {
  Training memory(GetParam());
  memory.steps(1, 2);
  const StateDict before = memory.optimizer->state_dict();
  const auto parameters_before = clones_of(memory.parameters);
  const auto state_before = tensors_in(before);
  memory.steps(3, 3);
  int refused = 0, unchanged = 0;
  for (int number = 1; number < 1000; number += 1 + number / 8) {
    Faults faults;
    Training outside(GetParam());
    outside.optimizer->keep_state_in(file(), faults);
    outside.steps(1, 2);
    set_gradients(outside.parameters, 3);
    faults.calls = 0;
    faults.fail_at = number;
    std::string failure;
    try {
      outside.optimizer->step();
    } catch (const Error& error) {
      failure = error.what();
    }
    faults.fail_at = 0;
    if (failure.empty()) {
      EXPECT_TRUE(same_bits(outside.all(), memory.all()));
      EXPECT_TRUE(GetParam().name == "SGD" || (refused > 0 && unchanged > 0)) << refused << ", " << unchanged;
      return;
    }
    if (failure.find("midway") == std::string::npos) {
      ++unchanged;
      ASSERT_TRUE(same_bits(clones_of(outside.parameters), parameters_before)) << "call " << number;
      ASSERT_TRUE(same_bits(tensors_in(outside.optimizer->state_dict()), state_before)) << "call " << number;
      set_gradients(outside.parameters, 3);
    } else {
      ++refused;
      ASSERT_THAT(failure, AllOf(HasSubstr("spill file in '" + folder.path().string()), HasSubstr("snapshot")))
          << "call " << number;
      ASSERT_THAT(error_of<Error>([&] { outside.optimizer->step(); }), HasSubstr("midway"));
      for (size_t i = 0; i < parameters_before.size(); ++i) {
        outside.parameters[i].detach().copy_(parameters_before[i]);
      }
      Training again(GetParam());
      again.steps(1, 2);
      outside.optimizer->load_state_dict(again.optimizer->state_dict());
      set_gradients(outside.parameters, 3);
    }
    outside.optimizer->step();
    ASSERT_TRUE(same_bits(outside.all(), memory.all())) << "call " << number;
  }
  ADD_FAILURE() << "there is no end to the calls";
}

TEST_P(StateInFile, IsUnchangedByAStepThatRunsOutOfMemory) {
  Training expected(GetParam());
  expected.steps(1, 1);
  Training begun(GetParam(), file());
  for_each_failing_allocation([&](FailingAllocation& allocation) {
    Training outside(GetParam(), file());
    set_gradients(outside.parameters, 1);
    if (allocation.stops([&] { outside.optimizer->step(); })) {
      ASSERT_TRUE(same_bits(outside.all(), begun.all()));
      outside.optimizer->step();
    }
    ASSERT_TRUE(same_bits(outside.all(), expected.all()));
  });
}

TEST_P(StateInFile, IsUnchangedByAMoveThatFails) {
  Training memory(GetParam());
  memory.steps(1, 1);
  const auto expected = memory.all();
  for (int number = 1; number < 1000; number += 1 + number / 8) {
    Faults faults;
    faults.fail_at = number;
    Training moved(GetParam());
    moved.steps(1, 1);
    bool has_failed = false;
    try {
      moved.optimizer->keep_state_in(file(), faults);
    } catch (const Error&) {
      has_failed = true;
    }
    faults.fail_at = 0;
    ASSERT_EQ(is_in_file(*moved.optimizer), !has_failed);
    ASSERT_TRUE(same_bits(moved.all(), expected));
    if (!has_failed) {
      EXPECT_TRUE(number > 1 || GetParam().name == "SGD");
      return;
    }
  }
}

const Kind kAdamW = kinds().front();

TEST(StateInFileOfAdamW, IsUnchangedIfTheDiskIsFull) {
  const TemporaryFolder folder;
  Training memory(kAdamW), outside(kAdamW, StateFile{.directory = folder.path(), .window = kSmallWindow});
  const auto before = outside.all();
  set_gradients(outside.parameters, 1);
  {
    const FileSizeLimit limit(500'000);
    EXPECT_THAT(error_of<Error>([&] { outside.optimizer->step(); }),
                AllOf(HasSubstr("find room"), HasSubstr("File too large"), HasSubstr("another disk")));
  }
  EXPECT_TRUE(same_bits(outside.all(), before));
  outside.optimizer->step();
  memory.steps(1, 1);
  EXPECT_TRUE(same_bits(outside.all(), memory.all()));
}

TEST(StateInFileOfAdamW, NoticesBytesThatTheDiskHasLost) {
  class Lossy final : public detail::SpillCalls {
   public:
    std::atomic<bool> loses{false};
    ssize_t pread(int file, void* data, size_t size, off_t offset) override {
      const ssize_t got = SpillCalls::pread(file, data, size, offset);
      if (loses && got > 0) {
        *static_cast<char*>(data) ^= 1;
      }
      return got;
    }
  } lossy;
  const TemporaryFolder folder;
  Training outside(kAdamW);
  outside.optimizer->keep_state_in(StateFile{.directory = folder.path(), .window = kSmallWindow}, lossy);
  outside.steps(1, 1);
  const auto before = clones_of(outside.parameters);
  lossy.loses = true;
  set_gradients(outside.parameters, 2);
  EXPECT_THAT(error_of<Error>([&] { outside.optimizer->step(); }), HasSubstr("not those that were stored"));
  EXPECT_TRUE(same_bits(clones_of(outside.parameters), before));
}

TEST(StateInFileOfAdamW, LiesInSnapshotsWithoutTakingMemory) {
  const TemporaryFolder folder;
  Training memory(kAdamW), outside(kAdamW, StateFile{.directory = folder.path(), .window = kSmallWindow});
  memory.steps(1, 2);
  outside.steps(1, 2);
  SnapshotStore snapshots(folder / "snapshots");
  const std::map<std::string, Stateful> parts{{"optimizer", stateful(*outside.optimizer)}};
  int64_t peak = 0;
  {
    const MemoryMeter meter;
    snapshots.save(2, parts);
    EXPECT_EQ(snapshots.load_latest(parts), 2);
    peak = meter.report().peak_bytes;
  }
  const int64_t one = memory.parameters.back().numel() * 4;  // one that the file lends in another order is copied
  EXPECT_LE(peak, 3 * one + 4096);
  memory.steps(3, 4);
  outside.steps(3, 4);
  EXPECT_TRUE(same_bits(outside.all(), memory.all()));
}

TEST(StateInFileOfAdamW, IsThatOfUpdatesInBackward) {
  const TemporaryFolder folder;
  const auto run = [&](bool in_file) {
    auto model = testing::make_mlp({32, 300, 300, 8});
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    if (in_file) {
      optimizer.keep_state_in(StateFile{.directory = folder.path(), .window = kSmallWindow});
    }
    const StepInBackward in_backward(optimizer);
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(step);
      model->forward(torch::randn({4, 32})).pow(2).sum().backward();
    }
    auto all = clones_of(model->parameters());
    const auto state = tensors_in(optimizer.state_dict());
    all.insert(all.end(), state.begin(), state.end());
    return all;
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(StateInFileOfSGD, GetsABufferWhenMomentumComesLater) {
  for (const double dampening : {0.0, 0.5}) {
    const TemporaryFolder folder;
    const Kind sgd = kind<SGD>("SGD", SGDOptions{.lr = 0.01});
    Training memory(sgd), outside(sgd, StateFile{.directory = folder.path(), .window = kSmallWindow});
    for (Training* training : {&memory, &outside}) {
      training->steps(1, 2);
      static_cast<torch::optim::SGDOptions&>(training->optimizer->param_groups()[0].options())
          .momentum(0.9)
          .dampening(dampening);
      training->steps(3, 5);
    }
    EXPECT_TRUE(same_bits(outside.all(), memory.all()));
  }
}

TEST(StateInFileOfAdamW, RefusesWhatCannotWork) {
  const TemporaryFolder folder;
  Training training(kAdamW);
  EXPECT_THAT(error_of<ConfigError>([&] { training.optimizer->keep_state_in(StateFile{.window = Bytes(1000)}); }),
              AllOf(HasSubstr("1000 B"), HasSubstr("192.00 KiB")));
  EXPECT_THAT(
      error_of<ConfigError>([&] { training.optimizer->keep_state_in(StateFile{.window = Bytes::unlimited()}); }),
      HasSubstr("unlimited"));
  EXPECT_THAT(error_of<Error>([&] { training.optimizer->keep_state_in(StateFile{.directory = folder / "not-there"}); }),
              HasSubstr("not-there"));
  EXPECT_FALSE(is_in_file(*training.optimizer));
  training.steps(1, 1);
}

// --- a kill in the middle of an update

constexpr const char* kFolder = "SNUG_TEST_STATE_IN_FILE";

std::map<std::string, Stateful> parts_of(Training& training) {
  return {{"optimizer", stateful(*training.optimizer)},
          {"parameters",
           {[&training] {
              StateDict state;
              for (size_t i = 0; i < training.parameters.size(); ++i) {
                state.set(std::to_string(i), training.parameters[i].detach());
              }
              return state;
            },
            [&training](const StateDict& state) {
              for (size_t i = 0; i < training.parameters.size(); ++i) {
                training.parameters[i].detach().copy_(state.get<Tensor>(std::to_string(i)));
              }
            }}}};
}

// In a process of its own: two steps, a snapshot, and steps until the call that kills it.
void train_until_killed(int call) {
  const auto folder = std::filesystem::path(std::getenv(kFolder)) / std::to_string(call);
  std::filesystem::create_directories(folder);
  Faults faults;
  Training training(kAdamW);
  training.optimizer->keep_state_in(StateFile{.directory = folder, .window = kSmallWindow}, faults);
  training.steps(1, 2);
  SnapshotStore(folder / "snapshots").save(2, parts_of(training));
  faults.kill = true;
  faults.calls = 0;
  faults.fail_at = call;
  training.steps(3, 9);
}

TEST(StateInFileDeathTest, AKilledUpdateIsResumedFromTheSnapshotWithTheSameBits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::optional<TemporaryFolder> folder;
  if (std::getenv(kFolder) == nullptr) {  // in the process that is killed it is there
    folder.emplace();
    ::setenv(kFolder, folder->path().c_str(), 0);
  }
  const std::vector<int> calls{1, 2, 9, 40, 100};
  for (const int call : calls) {
    EXPECT_EXIT(train_until_killed(call), ::testing::KilledBySignal(SIGKILL), "");
  }
  ::unsetenv(kFolder);
  Training expected(kAdamW);
  expected.steps(1, 5);
  for (const int call : calls) {
    const auto at = *folder / std::to_string(call);
    Training resumed(kAdamW, StateFile{.directory = at, .window = kSmallWindow});
    ASSERT_EQ(SnapshotStore(at / "snapshots").load_latest(parts_of(resumed)), 2) << "call " << call;
    resumed.steps(3, 5);
    EXPECT_TRUE(same_bits(resumed.all(), expected.all())) << "call " << call;
  }
}

}  // namespace
}  // namespace snug::state_in_file_test
