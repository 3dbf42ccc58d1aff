// Every input that a fuzzer has kept, or that has once been a finding, is read again: in each build, without clang.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/fuzz/targets.h"

namespace snug::fuzz::corpus_test {
namespace {

namespace fs = std::filesystem;

TEST(FuzzCorpus, IsReadOrRefusedByAnErrorOfSnug) {
  for (const auto& [name, target] : targets()) {
    int read = 0, refused = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(SNUG_FUZZ_CORPUS) / name)) {
      SCOPED_TRACE(entry.path().string());
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      try {
        target(bytes);
        ++read;
      } catch (const Error&) {
        ++refused;
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    EXPECT_GT(read, 0) << name << ": no input of the corpus is right, so what follows the first check is not tried";
    EXPECT_GT(refused, 0) << name;
  }
}

}  // namespace
}  // namespace snug::fuzz::corpus_test
