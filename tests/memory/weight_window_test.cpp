// WeightWindow and TensorsInFile: tensors in files are used as any others, are no tensor memory, and few of their bytes
// are in memory at a time.

#include "src/memory/weight_window.h"

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/file_memory.h"
#include "src/memory/operator_mode.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::weight_window_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using torch::Tensor;

constexpr int64_t kMiB = 1 << 20;

// Bytes of this process's memory that are pages of files in `folder`.
int64_t resident_of(const TemporaryFolder& folder) {
  std::ifstream maps("/proc/self/smaps");
  int64_t bytes = 0;
  bool is_ours = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(folder.path().string()) != std::string::npos) {
      is_ours = true;
    } else if (is_ours && line.starts_with("Rss:")) {
      bytes += std::stoll(line.substr(4)) * 1024;
      is_ours = false;
    }
  }
  return bytes;
}

// `count` matrices of a MiB.
std::vector<Tensor> matrices_in(const TemporaryFolder& folder, int count) {
  const TensorsInFile in_file(folder.path());
  std::vector<Tensor> matrices;
  for (int i = 0; i < count; ++i) {
    matrices.push_back(torch::full({512, 512}, 0.001 * (i + 1)));
  }
  return matrices;
}

std::vector<c10::Storage> storages_of(const std::vector<Tensor>& tensors) {
  std::vector<c10::Storage> storages;
  for (const Tensor& tensor : tensors) {
    storages.push_back(tensor.storage());
  }
  return storages;
}

// A window as large as the largest of tensors in files.
struct FileWindow {
  explicit FileWindow(const std::vector<Tensor>& tensors)
      : bytes(detail::WeightWindow::bytes_for(storages_of(tensors))),
        home(storages_of(tensors), bytes),
        window(storages_of(tensors), home, bytes) {}

  int64_t bytes;
  detail::FileHome home;
  detail::WeightWindow window;
};

// Notes what the window asks for.
class NotedHome final : public detail::WeightHome {
 public:
  void bring(size_t number) override {
    if (number == refused) {
      throw Error("refused");
    }
    asked += " +" + std::to_string(number);
  }
  void let_go(size_t number, bool is_written) override {
    asked += " -" + std::to_string(number) + (is_written ? "w" : "");
  }
  bool brings_beside_operators() const override { return is_beside; }
  void read_ahead(size_t number) override { asked += " ?" + std::to_string(number); }
  void exceed(int64_t bytes) override { asked += " " + std::to_string(bytes); }
  std::string news() { return std::exchange(asked, ""); }

  std::string asked;
  size_t refused = 99;
  bool is_beside = false;
};

TEST(TensorsInFile, AreNoTensorMemoryAndKeepTheirValuesWhenTheirPagesAreLetGo) {
  const TemporaryFolder folder;
  const int64_t before = live_bytes(torch::kCPU).count();
  const MemoryLimit limit(torch::kCPU, Bytes(before + kMiB / 2));
  const std::vector<Tensor> matrices = matrices_in(folder, 4);
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
  EXPECT_GE(resident_of(folder), 4 * kMiB);
  for (const Tensor& matrix : matrices) {
    detail::let_go_of_pages(matrix);
  }
  EXPECT_EQ(resident_of(folder), 0);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(matrices[static_cast<size_t>(i)][511][511].item<float>(), static_cast<float>(0.001 * (i + 1)));
  }
}

TEST(TensorsInFile, SmallOnesAreInMemory) {
  const TemporaryFolder folder;
  const TensorsInFile in_file(folder.path());
  const Tensor small = torch::zeros({100}), large = torch::zeros({100'000});
  EXPECT_FALSE(detail::FileMemory::holds(small.const_data_ptr()));
  EXPECT_TRUE(detail::FileMemory::holds(large.const_data_ptr()));
}

TEST(TensorsInFile, SaysWhatIsWrongWithTheDirectory) {
  EXPECT_THAT(error_of<ConfigError>([] { const TensorsInFile none(""); }), HasSubstr("empty"));
  const TemporaryFolder folder;
  const TensorsInFile in_file(folder / "absent");
  EXPECT_THAT(error_of<Error>([] { torch::zeros({100'000}); }), HasSubstr("absent"));
}

// Forward, backward and optimizer-like writes over eight matrices, of which one is in memory at a time.
TEST(WeightWindow, HoldsOneTensorAtATimeWhateverUsesThem) {
  const TemporaryFolder folder;
  std::vector<Tensor> matrices = matrices_in(folder, 8);
  const auto run = [&](const std::function<void()>& after_each) {
    Tensor hidden = torch::ones({4, 512});
    for (Tensor& matrix : matrices) {
      matrix.set_requires_grad(true);
      hidden = hidden.mm(matrix);
      after_each();
    }
    hidden.sum().backward();
    after_each();
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (Tensor& matrix : matrices) {
      gradients.push_back(matrix.grad().clone());
      matrix.mul_(0.5).mul_(2);
      matrix.mutable_grad().reset();
      after_each();
    }
    return gradients;
  };
  const std::vector<Tensor> plain = run([] {});
  const int64_t before = live_bytes(torch::kCPU).count();
  const detail::OperatorSeam seam;
  FileWindow window(matrices);
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before + kMiB) << "the window counts";
  int64_t most = 0;
  const std::vector<Tensor> windowed = run([&] { most = std::max(most, resident_of(folder)); });
  EXPECT_TRUE(testing::same_bits(plain, windowed));
  EXPECT_GE(most, kMiB / 2);
  EXPECT_LE(most, kMiB + (64 << 10)) << "pages at both ends, and those around a fault";
}

TEST(WeightWindow, CountsWhatOneOperatorTakesAboveTheWindow) {
  const TemporaryFolder folder;
  const std::vector<Tensor> matrices = matrices_in(folder, 3);
  const detail::OperatorSeam seam;
  FileWindow window(matrices);
  const int64_t before = live_bytes(torch::kCPU).count();
  const auto add_all = [&] { return torch::stack(matrices).sum(); };  // makes 3 MiB of 3 MiB, of which one counts
  {
    const MemoryLimit limit(torch::kCPU, Bytes(before + 5 * kMiB));
    EXPECT_NO_THROW(add_all());
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
  const MemoryLimit limit(torch::kCPU, Bytes(before + 5 * kMiB - 1));
  EXPECT_THROW(add_all(), c10::OutOfMemoryError);
  EXPECT_NO_THROW(matrices[0].sum()) << "one fits as ever";
}

TEST(WeightWindow, TellsItsHomeWhatComesWhatGoesAndWhatWasWritten) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::ones({2}));
  }
  NotedHome home;
  const detail::OperatorSeam seam;
  detail::WeightWindow window(storages_of(tensors), home, 16);
  EXPECT_EQ(home.news(), " -0 -1 -2 -3");
  tensors[0].neg();
  tensors[1][0].mul_(3);
  tensors[0].neg();
  EXPECT_EQ(home.news(), " +0 +1");
  tensors[2].neg();
  EXPECT_EQ(home.news(), " -1w +2") << "the one used longest ago";
  detail::report_unseen_write(tensors[0]);
  torch::stack({tensors[1], tensors[2], tensors[3]});
  EXPECT_EQ(home.news(), " -0w +1 +3 8 -1 0") << "more than the window while the operator runs";
  window.let_go();
  EXPECT_EQ(home.news(), " -0 -1 -2 -3");
  tensors[0].neg();
  EXPECT_EQ(home.news(), " +0 ?1") << "the order of the last time";
  home.refused = 3;
  EXPECT_THROW(torch::add(tensors[2], tensors[3]), Error);
  tensors[2].neg();
  EXPECT_EQ(home.news(), " +2 -0") << "what was brought before the refusal is in";
  home.refused = 99;
  tensors[3].neg();
  EXPECT_EQ(home.news(), " +3");
}

TEST(WeightWindow, BringsAheadInTheOrderOfTheLastTimeAndKeepsWhatIsUsedNext) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::ones({2}));
  }
  NotedHome home;
  home.is_beside = true;
  const detail::OperatorSeam seam;
  detail::WeightWindow window(storages_of(tensors), home, 16);
  const auto news_of = [&](const std::vector<size_t>& uses) {
    std::vector<std::string> all;
    for (const size_t number : uses) {
      tensors[number].neg();
      all.push_back(home.news());
    }
    return all;
  };
  const auto begin_again = [&] {
    window.let_go();
    home.news();
  };
  using ::testing::ElementsAre;
  begin_again();
  EXPECT_THAT(news_of({0, 1, 2, 3, 3, 2, 1, 0}),
              ElementsAre(" +0", " +1", " -0 +2", " -1 +3", "", "", " -3 +1", " -2 +0"));
  begin_again();
  EXPECT_THAT(news_of({0, 1, 2, 3, 3, 2, 1, 0}),
              ElementsAre(" +0 +1 -0 +2", " -1 +3", "", "", " -3 +1", " -2 +0", "", ""));
  begin_again();
  EXPECT_THAT(news_of({0, 1, 3, 1, 0}), ElementsAre(" +0 +1 -0 +2", " -1 +3", "", " -2 +1", " -3 +0"))
      << "another order";
  begin_again();
  EXPECT_THAT(news_of({0, 1, 3, 1, 0}), ElementsAre(" +0 +1 -0 +3", "", " -3 +0", "", "")) << "the new order";
}

}  // namespace
}  // namespace snug::weight_window_test
