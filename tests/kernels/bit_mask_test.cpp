#include "snug/kernels/detail/bit_mask.h"

#include <random>
#include <vector>

#include <gmock/gmock.h>

namespace snug::kernels::bit_mask_test {
namespace {

std::vector<uint8_t> random_mask(size_t count) {
  std::mt19937 random(5);
  std::vector<uint8_t> mask(count);
  for (uint8_t& element : mask) {
    element = random() & 1;
  }
  return mask;
}

TEST(BitMask, PutsElementIIntoBitIOfItsByte) {
  const std::vector<uint8_t> mask{1, 0, 1, 1, 0, 0, 0, 1, 0, 1};
  std::vector<uint8_t> bits(2);
  pack_bits(mask.data(), 10, bits.data());
  EXPECT_EQ(bits, (std::vector<uint8_t>{0b10001101, 0b10}));
}

TEST(BitMask, ComesBackExactlyForAnyCount) {
  for (size_t count = 0; count < 70; ++count) {
    const auto mask = random_mask(count);
    std::vector<uint8_t> bits(static_cast<size_t>(bit_mask_bytes(static_cast<int64_t>(count))) + 1, 0xEE);
    pack_bits(mask.data(), static_cast<int64_t>(count), bits.data());
    EXPECT_EQ(bits.back(), 0xEE) << "nothing is written behind the end";
    std::vector<uint8_t> back(count + 1, 0xEE);
    unpack_bits(bits.data(), static_cast<int64_t>(count), back.data());
    EXPECT_EQ(back.back(), 0xEE);
    back.pop_back();
    EXPECT_EQ(back, mask);
  }
}

template <class Word>
class TwoValued : public ::testing::Test {};
using Words = testing::Types<uint16_t, uint32_t, uint64_t>;
TYPED_TEST_SUITE(TwoValued, Words);

TYPED_TEST(TwoValued, ComeBackExactly) {
  for (const size_t count : {0, 1, 8, 255, 256, 257, 1003}) {
    std::vector<TypeParam> values;
    for (const uint8_t element : random_mask(count)) {
      values.push_back(element != 0 ? TypeParam{0xABCD} : TypeParam{0});
    }
    std::vector<uint8_t> bits(count / 8 + 1);
    TypeParam other = 1;
    ASSERT_TRUE(pack_two_valued(values.data(), static_cast<int64_t>(count), bits.data(), other));
    std::vector<TypeParam> back(count);
    unpack_two_valued(bits.data(), static_cast<int64_t>(count), other, back.data());
    EXPECT_EQ(back, values);
  }
}

TYPED_TEST(TwoValued, AreRefusedWhereAThirdValueIsAmongThem) {
  for (const size_t place : {1, 700, 999}) {
    std::vector<TypeParam> values(1000, TypeParam{7});
    values[3] = 0;
    values[place] = 8;
    std::vector<uint8_t> bits(125);
    TypeParam other = 0;
    EXPECT_FALSE(pack_two_valued(values.data(), 1000, bits.data(), other)) << place;
  }
}

}  // namespace
}  // namespace snug::kernels::bit_mask_test
