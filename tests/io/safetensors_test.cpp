#include "snug/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "src/io/safetensors_file.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unsynced_file_system.h"

namespace snug::safetensors_test {
namespace {

using ::testing::AllOf;
using testing::FailingFileSystem;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
using Tensors = std::map<std::string, at::Tensor>;

std::string content_of(const std::filesystem::path& path) { return detail::FileSystem::real().read_file(path); }

void write(const std::filesystem::path& path, std::string_view content) {
  testing::unsynced_files().write_file(path, std::array{content});
}

// Equal in dtype, shape and every bit, NaNs and negative zeros included.
void expect_same_bits(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  ASSERT_EQ(a.sizes(), b.sizes());
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  EXPECT_TRUE(x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

const std::vector<at::ScalarType> kDtypes{at::kBool,     at::kByte,        at::kChar,          at::kShort,
                                          at::kInt,      at::kLong,        at::kUInt16,        at::kUInt32,
                                          at::kUInt64,   at::kHalf,        at::kFloat,         at::kDouble,
                                          at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kComplexFloat};

TEST(Safetensors, RoundTripsEveryDtypeBitForBit) {
  TemporaryFolder folder;
  at::manual_seed(1);
  Tensors tensors;
  for (const at::ScalarType dtype : kDtypes) {
    const int64_t bytes = 7 * static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t limit = dtype == at::kBool ? 2 : 256;  // any bits, but for bool
    tensors[c10::toString(dtype)] = at::randint(limit, {bytes}, at::kByte).view(dtype);
  }
  save_safetensors(folder / "all", tensors);
  const Tensors loaded = load_safetensors(folder / "all");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    expect_same_bits(loaded.at(name), tensor);
  }
}

TEST(Safetensors, RoundTripsEveryShape) {
  TemporaryFolder folder;
  const Tensors tensors{{"scalar", at::scalar_tensor(-0.0)},
                        {"empty", at::empty({0})},
                        {"empty rows", at::empty({3, 0, 2})},
                        {"one", at::ones({1, 1, 1})},
                        {"matrix", at::randn({5, 3})}};
  save_safetensors(folder / "shapes", tensors);
  const Tensors loaded = load_safetensors(folder / "shapes");
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    expect_same_bits(loaded.at(name), tensor);
  }
}

TEST(Safetensors, WritesTheValuesOfViewsNotTheirMemory) {
  TemporaryFolder folder;
  const at::Tensor base = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor complex = at::view_as_complex(at::randn({3, 2}));
  const Tensors tensors{{"transposed", base.t()},       {"strided", base.slice(1, 0, 6, 2)},
                        {"row", base.select(0, 2)},     {"expanded", at::ones({1, 2}).expand({3, 2})},
                        {"conjugated", complex.conj()}, {"leaf", at::ones({2}).requires_grad_()}};
  save_safetensors(folder / "views", tensors);
  const Tensors loaded = load_safetensors(folder / "views");
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(at::equal(loaded.at(name), tensor.detach().resolve_conj())) << name;
    EXPECT_FALSE(loaded.at(name).requires_grad());
  }
}

TEST(Safetensors, KeepsMetadataAndAnEmptyFile) {
  TemporaryFolder folder;
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"note", "π\n\"x\""}};
  save_safetensors(folder / "none", {}, metadata);
  EXPECT_EQ(read_safetensors_metadata(folder / "none"), metadata);
  EXPECT_TRUE(load_safetensors(folder / "none").empty());
  save_safetensors(folder / "none", {});
  EXPECT_TRUE(read_safetensors_metadata(folder / "none").empty());
}

TEST(Safetensors, GivesTheSameBytesForTheSameContent) {
  TemporaryFolder folder;
  const at::Tensor values = at::arange(6, at::kFloat);
  const Tensors tensors{{"b", values}, {"a", values.to(at::kByte)}, {"c", values.to(at::kDouble)}};
  const Tensors copies{{"c", values.to(at::kDouble)}, {"a", values.to(at::kByte)}, {"b", values}};
  save_safetensors(folder / "1", tensors, {{"k", "v"}, {"a", "b"}});
  save_safetensors(folder / "2", copies, {{"a", "b"}, {"k", "v"}});
  EXPECT_EQ(content_of(folder / "1"), content_of(folder / "2"));
}

TEST(Safetensors, AlignsEveryTensorToItsElements) {
  TemporaryFolder folder;
  save_safetensors(
      folder / "mixed",
      {{"a", at::ones({3}, at::kByte)}, {"b", at::ones({3}, at::kDouble)}, {"c", at::ones({3}, at::kHalf)}});
  const std::string bytes = content_of(folder / "mixed");
  // 8-byte elements first, then 2, then 1; the JSON is padded to 8.
  EXPECT_EQ(bytes.find('{'), 8u);
  EXPECT_LT(bytes.find("\"b\""), bytes.find("\"c\""));
  EXPECT_LT(bytes.find("\"c\""), bytes.find("\"a\""));
  EXPECT_EQ((bytes.size() - 3 * (8 + 2 + 1)) % 8, 0u);
}

TEST(Safetensors, WritesContiguousTensorsFromWhereTheyAre) {
  const at::Tensor here = at::ones({4});
  const at::Tensor view = at::ones({4, 4}).t();
  const detail::SafetensorsContent content({{"a", here}, {"b", view}}, {}, "file");
  ASSERT_EQ(content.parts().size(), 3u);
  EXPECT_EQ(content.parts()[1].data(), here.const_data_ptr());
  EXPECT_NE(content.parts()[2].data(), view.const_data_ptr());
}

TEST(Safetensors, LoadsIntoMemoryOfItsOwn) {
  TemporaryFolder folder;
  save_safetensors(folder / "w", {{"w", at::ones({1000})}});
  const at::Tensor first = load_safetensors(folder / "w").at("w");
  save_safetensors(folder / "w", {{"w", at::zeros({1000})}});
  const at::Tensor second = load_safetensors(folder / "w").at("w");
  std::filesystem::remove(folder / "w");
  EXPECT_TRUE(at::equal(first, at::ones({1000})));
  EXPECT_TRUE(at::equal(second, at::zeros({1000})));
}

TEST(Safetensors, RefusesWhatTheFormatCannotHold) {
  TemporaryFolder folder;
  const auto saving = [&](const std::string& name, const at::Tensor& tensor) {
    return [&folder, name, tensor] { save_safetensors(folder / "bad", {{name, tensor}}); };
  };
  const auto refused = [](const std::string& what) {
    return ThrowsMessage<ConfigError>(AllOf(HasSubstr("bad"), HasSubstr(what)));
  };
  EXPECT_THAT(saving("w", at::Tensor()), refused("'w' is undefined"));
  EXPECT_THAT(saving("w", at::ones({2}, at::kComplexDouble)), refused("ComplexDouble"));
  EXPECT_THAT(saving("w", at::ones({2, 2}).to_sparse()), refused("dense"));
  EXPECT_THAT(saving("w", at::empty({2}, at::kMeta)), refused("dense"));
  EXPECT_THAT(saving("__metadata__", at::ones({2})), refused("reserves"));
  EXPECT_THAT(saving("\xff", at::ones({2})), refused("UTF-8"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Safetensors, TellsAMissingFileFromADamagedOne) {
  TemporaryFolder folder;
  EXPECT_THAT([&] { load_safetensors(folder / "absent"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("absent"), HasSubstr("No such file"))));
  EXPECT_THAT([&] { load_safetensors(folder.path()); }, ThrowsMessage<Error>(HasSubstr("Is a directory")));
}

TEST(Safetensors, RefusesEveryTruncationOfAFile) {
  TemporaryFolder folder;
  save_safetensors(folder / "w", {{"a", at::ones({3})}, {"b", at::ones({2}, at::kByte)}});
  const std::string whole = content_of(folder / "w");
  for (size_t size = 0; size < whole.size(); ++size) {
    write(folder / "cut", whole.substr(0, size));
    EXPECT_THAT([&] { load_safetensors(folder / "cut"); }, ThrowsMessage<CorruptFile>(HasSubstr("cut"))) << size;
  }
  write(folder / "cut", whole + "x");
  EXPECT_THROW(load_safetensors(folder / "cut"), CorruptFile);
}

// No claim that damage is found (that is what checksums are for): only that it does no harm.
TEST(Safetensors, SurvivesEveryFlippedBitOfAHeader) {
  TemporaryFolder folder;
  save_safetensors(folder / "w", {{"a", at::ones({3, 2})}, {"b", at::ones({2}, at::kByte)}});
  const std::string whole = content_of(folder / "w");
  int64_t refused = 0;
  int64_t tried = 0;
  for (size_t at = 0; at < whole.size() - 26; ++at) {
    for (int bit = 0; bit < 8; ++bit, ++tried) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      write(folder / "damaged", damaged);
      try {
        load_safetensors(folder / "damaged");
      } catch (const CorruptFile&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, tried / 2);
}

TEST(Safetensors, AsksForNoMemoryThatTheFileCannotFill) {
  TemporaryFolder folder;
  const std::string json = R"({"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}})";
  std::string prefix(8, '\0');
  prefix[0] = static_cast<char>(json.size());
  write(folder / "huge", prefix + json + "four");
  EXPECT_THAT([&] { load_safetensors(folder / "huge"); },
              ThrowsMessage<CorruptFile>(HasSubstr("data_offsets end at 4000000000000")));
}

TEST(Safetensors, RefusesBooleansThatAreNeitherZeroNorOne) {
  TemporaryFolder folder;
  save_safetensors(folder / "mask", {{"mask", at::ones({5}, at::kBool)}});
  std::string bytes = content_of(folder / "mask");
  bytes.back() = 2;
  write(folder / "mask", bytes);
  EXPECT_THAT([&] { load_safetensors(folder / "mask"); },
              ThrowsMessage<CorruptFile>(AllOf(HasSubstr("'mask'"), HasSubstr("BOOL"))));
}

// A model of three tensors in two files, and their index.
void save_shards(const TemporaryFolder& folder) {
  save_safetensors(folder / "1.safetensors", {{"a", at::ones({3})}, {"c", at::zeros({2}, at::kLong)}});
  save_safetensors(folder / "2.safetensors", {{"b", at::full({2, 2}, 5.0)}});
  write(
      folder / "model.safetensors.index.json",
      R"({"metadata": {"total_size": 44}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}})");
}

TEST(SafetensorsShards, AreLoadedByTheirIndex) {
  TemporaryFolder folder;
  save_shards(folder);
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  const Tensors loaded = load_safetensors(index);
  ASSERT_EQ(loaded.size(), 3u);
  expect_same_bits(loaded.at("a"), at::ones({3}));
  expect_same_bits(loaded.at("b"), at::full({2, 2}, 5.0));
  expect_same_bits(loaded.at("c"), at::zeros({2}, at::kLong));
  EXPECT_EQ(read_safetensors_metadata(index), (std::map<std::string, std::string>{{"total_size", "44"}}));
}

TEST(SafetensorsShards, AreFoundBesideALinkToTheIndex) {
  TemporaryFolder folder, cache;
  save_shards(cache);
  for (const char* name : {"model.safetensors.index.json", "1.safetensors", "2.safetensors"}) {
    std::filesystem::create_symlink(cache / name, folder / name);
  }
  std::filesystem::rename(cache / "model.safetensors.index.json", cache / "blob");
  std::filesystem::remove(folder / "model.safetensors.index.json");
  std::filesystem::create_symlink(cache / "blob", folder / "model.safetensors.index.json");
  EXPECT_EQ(load_safetensors(folder / "model.safetensors.index.json").size(), 3u);
}

TEST(SafetensorsShards, AreOpenedOnceEach) {
  TemporaryFolder folder;
  save_shards(folder);
  const int events = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(::inotify_add_watch(events, folder.path().c_str(), IN_OPEN), 0);
  load_safetensors(folder / "model.safetensors.index.json");
  alignas(inotify_event) std::array<char, 4096> buffer;
  std::map<std::string, int> opened;
  for (ssize_t got; (got = ::read(events, buffer.data(), buffer.size())) > 0;) {
    for (ssize_t at = 0; at < got;) {
      const auto* event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
      ++opened[event->name];
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
  ::close(events);
  EXPECT_EQ(opened, (std::map<std::string, int>{
                        {"model.safetensors.index.json", 1}, {"1.safetensors", 1}, {"2.safetensors", 1}}));
}

TEST(SafetensorsShards, AreRefusedUnlessAllAreThereAndAsTheIndexSays) {
  TemporaryFolder folder;
  save_shards(folder);
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  const auto loading = [&] { load_safetensors(index); };
  save_safetensors(folder / "1.safetensors", {{"a", at::ones({3})}});
  EXPECT_THAT(loading, ThrowsMessage<CorruptFile>(
                           AllOf(HasSubstr(index.string()), HasSubstr("'c'"), HasSubstr("1.safetensors"))));
  save_safetensors(folder / "1.safetensors", {{"a", at::ones({3})}, {"b", at::ones({3})}, {"c", at::ones({3})}});
  EXPECT_THAT(loading, ThrowsMessage<CorruptFile>(
                           AllOf(HasSubstr(index.string()), HasSubstr("'b'"), HasSubstr("1.safetensors"))));
  save_shards(folder);
  write(folder / "2.safetensors", "short");
  EXPECT_THAT(loading, ThrowsMessage<CorruptFile>(HasSubstr((folder / "2.safetensors").string())));
  std::filesystem::remove(folder / "2.safetensors");
  EXPECT_THAT(loading, ThrowsMessage<Error>(
                           AllOf(HasSubstr(index.string()), HasSubstr("2.safetensors is not in the same folder"))));
  write(index, R"({"weight_map": {"a": ")" + std::string(300, 'x') + "\"}}");
  EXPECT_THAT(loading, ThrowsMessage<Error>(HasSubstr("is not in the same folder")));
  write(index, R"({"weight_map": {"a": "model.safetensors.index.json"}})");
  EXPECT_THAT(loading, ThrowsMessage<CorruptFile>(HasSubstr("header's length")));  // an index is no shard
}

TEST(SafetensorsShards, AreRefusedWithAnIndexAboveTheLimitOfAHeader) {
  TemporaryFolder folder;
  write(folder / "model.safetensors.index.json", "{}");
  std::filesystem::resize_file(folder / "model.safetensors.index.json", 100'000'001);
  EXPECT_THAT([&] { load_safetensors(folder / "model.safetensors.index.json"); },
              ThrowsMessage<CorruptFile>(HasSubstr("the index has 100000001 bytes")));
}

// As save_safetensors, on files that may fail.
void save_to(const std::filesystem::path& path, const at::Tensor& w, detail::FileSystem& files) {
  detail::replace_file(path, detail::SafetensorsContent({{"w", w}}, {}, path.string()).parts(), files);
}

TEST(Safetensors, LeavesTheOldFileOrTheNewOneWhateverFails) {
  TemporaryFolder folder;
  FailingFileSystem counting({.fail_at = 0}, testing::unsynced_files());
  save_to(folder / "w", at::zeros({3}), counting);
  ASSERT_EQ(counting.operations(), 3);
  for (int64_t k = 1; k <= counting.operations(); ++k) {
    for (const bool then_dead : {false, true}) {
      SCOPED_TRACE(fmt::format("operation {} fails, dead after it: {}", k, then_dead));
      save_safetensors(folder / "w", {{"w", at::zeros({3})}});
      FailingFileSystem failing({.fail_at = k, .then_dead = then_dead}, testing::unsynced_files());
      EXPECT_THAT([&] { save_to(folder / "w", at::ones({3}), failing); },
                  ThrowsMessage<Error>(HasSubstr(fmt::format("fault {}", k))));
      const at::Tensor found = load_safetensors(folder / "w").at("w");
      EXPECT_TRUE(at::equal(found, k < 3 ? at::zeros({3}) : at::ones({3})));
      const auto names = detail::FileSystem::real().list(folder.path());
      EXPECT_EQ(
          std::any_of(names.begin(), names.end(), [&](const auto& name) { return detail::is_unfinished(name, "w"); }),
          then_dead && k < 3);
      detail::remove_unfinished(folder / "w");
    }
  }
}

}  // namespace
}  // namespace snug::safetensors_test
