// The hash of memory: equal for equal bytes, another one for any other.

#include "src/core/bytes_hash.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

namespace snug::bytes_hash_test {
namespace {

uint64_t hash_of(const std::string& bytes) { return detail::bytes_hash(bytes.data(), bytes.size()); }

TEST(BytesHash, ChangesWithEveryByteTheirOrderAndTheirNumber) {
  std::string bytes;
  std::set<uint64_t> hashes{hash_of(bytes)};
  size_t count = 1;
  for (int length = 1; length <= 100; ++length) {
    bytes += '\0';
    hashes.insert(hash_of(bytes));
    ++count;
    for (char& byte : bytes) {
      byte = '\1';
      hashes.insert(hash_of(bytes));
      byte = '\0';
      ++count;
    }
  }
  EXPECT_EQ(hashes.size(), count);
}

TEST(BytesHash, IsThatOfTheBytesWhereverTheyLie) {
  const std::string padded = "x" + std::string(77, 'a');
  EXPECT_EQ(detail::bytes_hash(padded.data() + 1, 77), hash_of(std::string(77, 'a')));
  EXPECT_EQ(detail::bytes_hash(nullptr, 0), hash_of(""));
}

}  // namespace
}  // namespace snug::bytes_hash_test
