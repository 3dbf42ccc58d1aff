#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::bytes_test {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::string error_of(std::string_view text) {
  try {
    return "parsed as " + std::to_string(Bytes::parse(text).count());
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Bytes, ParsesBinaryAndDecimalUnits) {
  EXPECT_EQ(Bytes::parse("2048").count(), 2048);
  EXPECT_EQ(Bytes::parse("7B").count(), 7);
  EXPECT_EQ(Bytes::parse("64 KiB").count(), 65536);
  EXPECT_EQ(Bytes::parse("300MB").count(), 300'000'000);
  EXPECT_EQ(Bytes::parse("1.5GiB").count(), 1610612736);
  EXPECT_EQ(Bytes::parse("2TB").count(), 2'000'000'000'000);
  EXPECT_EQ(Bytes::parse("3tib").count(), int64_t{3} << 40);
}

TEST(Bytes, ReadsSingleLettersAsPowersOf1024) {
  EXPECT_EQ(Bytes::parse("4k").count(), 4096);
  EXPECT_EQ(Bytes::parse("4M").count(), 4 << 20);
  EXPECT_EQ(Bytes::parse("1G").count(), 1 << 30);
  EXPECT_EQ(Bytes::parse("1t").count(), int64_t{1} << 40);
}

TEST(Bytes, IgnoresCaseAndSpacesAroundNumberAndUnit) {
  EXPECT_EQ(Bytes::parse("  1 gIb ").count(), 1 << 30);
  EXPECT_EQ(Bytes::parse("10mb").count(), 10'000'000);
  EXPECT_TRUE(Bytes::parse("Unlimited").is_unlimited());
}

TEST(Bytes, RoundsAFractionToTheNearestByte) {
  EXPECT_EQ(Bytes::parse("0.3KiB").count(), 307);        // 307.2
  EXPECT_EQ(Bytes::parse("0.0006KB").count(), 1);        // 0.6
  EXPECT_EQ(Bytes::parse("0.0004KB").count(), 0);        // 0.4
  EXPECT_EQ(Bytes::parse("0.1GiB").count(), 107374182);  // 107374182.4
  EXPECT_EQ(Bytes::parse("1.000000GB").count(), 1'000'000'000);
}

TEST(Bytes, KeepsEveryByteOfLargeWholeNumbers) {
  EXPECT_EQ(Bytes::parse("9007199254740993").count(), 9007199254740993);  // 2^53 + 1
  EXPECT_EQ(Bytes::parse("9223372036854775806").count(), kMax - 1);
  EXPECT_EQ(Bytes::parse("00000000000000000000000000012").count(), 12);
}

TEST(Bytes, RejectsWhatIsNoAmountAndQuotesIt) {
  for (const char* text : {"",      " ",       "GiB",        "-1",         "-1GiB",      "+1",       "1e9",   "1.GiB",
                           ".5GiB", "1.2.3MB", "1,5GiB",     "0x10",       "12 parsecs", "1GiBB",    "1Gi",   "1 000",
                           "nan",   "inf",     "unlimited!", "-unlimited", "1K iB",      "\xff\xfe", "1\nKiB"}) {
    const std::string error = error_of(text);
    EXPECT_NE(error.find("Bytes.parse: \"" + std::string(text) + "\""), std::string::npos) << error;
  }
  EXPECT_THROW((void)Bytes::parse(std::string_view("1\0KiB", 5)), ConfigError);
}

TEST(Bytes, RejectsAFractionWithoutAUnitBecauseTheUnitWasForgotten) {
  EXPECT_NE(error_of("1.5").find("fraction without a unit"), std::string::npos) << error_of("1.5");
  EXPECT_NE(error_of("1.5B").find("fraction without a unit"), std::string::npos);
}

TEST(Bytes, RejectsWhatOverflows) {
  for (const char* text : {"9223372036854775807", "9223372036854775808", "18446744073709551616", "8388608TiB",
                           "8388607.99999999999999999TiB", "9223373TB", "99999999999999999999999999999999GiB"}) {
    EXPECT_NE(error_of(text).find("64-bit"), std::string::npos) << error_of(text);
  }
  EXPECT_EQ(Bytes::parse("8388607TiB").count(), int64_t{8388607} << 40);
}

TEST(Bytes, RejectsANegativeCount) {
  EXPECT_THROW(Bytes(-1), ConfigError);
  EXPECT_THROW(Bytes(std::numeric_limits<int64_t>::min()), ConfigError);
  EXPECT_EQ(Bytes(0).count(), 0);
}

TEST(Bytes, PrintsTwoDecimalsInTheLargestFittingUnit) {
  EXPECT_EQ(Bytes(0).str(), "0 B");
  EXPECT_EQ(Bytes(1023).str(), "1023 B");
  EXPECT_EQ(Bytes(1024).str(), "1.00 KiB");
  EXPECT_EQ(Bytes(1610612736).str(), "1.50 GiB");
  EXPECT_EQ(Bytes(25 << 20).str(), "25.00 MiB");
  EXPECT_EQ(Bytes(kMax - 1).str(), "8.00 EiB");
  EXPECT_EQ(Bytes::unlimited().str(), "unlimited");
}

TEST(Bytes, NeverPrints1024OfAUnitThatHasALargerOne) {
  EXPECT_EQ(Bytes((1 << 20) - 1).str(), "1.00 MiB");
  EXPECT_EQ(Bytes((1 << 30) - 1).str(), "1.00 GiB");
  EXPECT_EQ(Bytes((1 << 20) - 6 * 1024).str(), "1018.00 KiB");
}

TEST(Bytes, OrdersUnlimitedAboveEverythingElse) {
  EXPECT_LT(Bytes(kMax - 1), Bytes::unlimited());
  EXPECT_EQ(Bytes::unlimited(), Bytes::unlimited());
  EXPECT_LT(Bytes(1), Bytes(2));
  EXPECT_EQ(Bytes(3), Bytes(3));
  EXPECT_GE(Bytes(3), Bytes(2));
  EXPECT_NE(Bytes(3), Bytes(2));
}

TEST(Bytes, AddsAndSubtracts) {
  EXPECT_EQ(Bytes(3) + Bytes(4), Bytes(7));
  EXPECT_EQ(Bytes(7) - Bytes(3), Bytes(4));
  EXPECT_EQ(Bytes(7) - Bytes(7), Bytes(0));
  EXPECT_EQ(Bytes(kMax - 2) + Bytes(1), Bytes(kMax - 1));
  EXPECT_THROW((void)(Bytes(3) - Bytes(4)), ConfigError);
}

TEST(Bytes, IsMultipliedAndDividedByNumbersToTheNearestByte) {
  EXPECT_EQ(Bytes(10) * 0.25, Bytes(3));
  EXPECT_EQ(Bytes(100) * 0.29, Bytes(29)) << "28.999999999999996 in doubles";
  EXPECT_EQ(Bytes(7) * 0, Bytes(0));
  EXPECT_EQ(Bytes(10) / 4, Bytes(3));
  EXPECT_EQ(Bytes(30) / 3, Bytes(10));
  EXPECT_EQ(Bytes(int64_t{1} << 52) * 2, Bytes(int64_t{1} << 53));
  for (const double factor : {-1.0, std::numeric_limits<double>::quiet_NaN(), HUGE_VAL}) {
    EXPECT_THROW((void)(Bytes(1) * factor), ConfigError) << factor;
    EXPECT_THROW((void)(Bytes(1) / factor), ConfigError) << factor;
  }
  EXPECT_THROW((void)(Bytes(1) / 0), ConfigError);
}

TEST(Bytes, BecomesUnlimitedRatherThanOverflow) {
  const Bytes unlimited = Bytes::unlimited();
  EXPECT_EQ(Bytes(kMax - 1) + Bytes(1), unlimited);
  EXPECT_EQ(Bytes(kMax - 1) + Bytes(kMax - 1), unlimited);
  EXPECT_EQ(Bytes(kMax - 1) * 2, unlimited);
  EXPECT_EQ(Bytes(kMax - 1) / 0.5, unlimited);
  EXPECT_EQ(unlimited + Bytes(1), unlimited);
  EXPECT_EQ(unlimited - Bytes(kMax - 1), unlimited);
  EXPECT_EQ(unlimited * 0.5, unlimited);
  EXPECT_EQ(unlimited / 2, unlimited);
  EXPECT_EQ(unlimited * 0, Bytes(0));
  EXPECT_THROW((void)(Bytes(1) - unlimited), ConfigError);
  EXPECT_THROW((void)(unlimited - unlimited), ConfigError);
}

}  // namespace
}  // namespace snug::bytes_test
