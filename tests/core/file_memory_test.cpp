#include "src/core/file_memory.h"

#include <array>
#include <string>
#include <string_view>

#include <ATen/ops/arange.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/file_system.h"
#include "tests/support/temporary_folder.h"

namespace snug::detail::file_memory_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

TEST(FileMemory, HoldsTensorsThatAreNoTensorMemoryAndLeavesNoFile) {
  TemporaryFolder folder;
  const int64_t before = live_bytes(at::kCPU).count();
  auto memory = FileMemory::in(folder.path(), 4 * 1000);
  at::Tensor tensor = tensor_in(memory, 400, {30, 30}, {30, 1}, at::kFloat);
  EXPECT_EQ(live_bytes(at::kCPU).count(), before);
  EXPECT_TRUE(detail::FileSystem::real().list(folder.path()).empty());
  memory.reset();  // the tensor has it still
  tensor.copy_(at::arange(900, at::kFloat).view({30, 30}));
  EXPECT_EQ(tensor[29][29].item<float>(), 899);
}

TEST(FileMemory, IsOfAFileThatNoWriteReaches) {
  TemporaryFolder folder;
  const std::string text = "abcdefgh";
  detail::FileSystem::real().write_file(folder / "file", std::array<std::string_view, 1>{text});
  const int file = ::open((folder / "file").c_str(), O_RDONLY);
  const auto memory = FileMemory::of(file, 8, "file");
  ::close(file);
  const at::Tensor tensor = tensor_in(memory, 4, {4}, {1}, at::kByte);
  EXPECT_EQ(tensor[0].item<int>(), 'e');
  tensor.fill_('x');
  EXPECT_EQ(tensor[3].item<int>(), 'x');
  EXPECT_EQ(detail::FileSystem::real().read_file(folder / "file"), text);
}

TEST(FileMemory, MayBeEmpty) {
  TemporaryFolder folder;
  EXPECT_EQ(tensor_in(FileMemory::in(folder.path(), 0), 0, {0, 3}, {3, 1}, at::kFloat).numel(), 0);
}

TEST(FileMemory, SaysWhereThereIsNoRoom) {
  TemporaryFolder folder;
  EXPECT_THAT([&] { FileMemory::in(folder / "absent", 8); },
              ThrowsMessage<Error>(AllOf(HasSubstr("absent"), HasSubstr("No such file"))));
  EXPECT_THAT([&] { FileMemory::in(folder.path(), int64_t{1} << 60); },
              ThrowsMessage<Error>(AllOf(HasSubstr("find room for"), HasSubstr(folder.path().string()))));
}

TEST(FileMemory, IsNotOfASparseTensor) {
  const at::Tensor sparse = at::eye(3).to_sparse();
  EXPECT_FALSE(is_in_file(sparse));
  let_go_of_pages(sparse);
  int tensors = 0;
  for_each_in_files({sparse, at::ones({2})}, [&](at::TensorList some) { tensors += static_cast<int>(some.size()); });
  EXPECT_EQ(tensors, 2);
}

}  // namespace
}  // namespace snug::detail::file_memory_test
