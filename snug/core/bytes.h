#pragma once
// Bytes: an amount of memory, so that budgets and limits are never confused with counts of other things.
//
//   snug::Bytes budget = snug::Bytes::parse("1.5GiB");
//   if (snug::Bytes(used) > budget) { ... budget.str() ... }      // "1.50 GiB"
//
// Bytes::unlimited() compares greater than every other amount, so "no limit" needs no special case.

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace snug {

class Bytes {
 public:
  /// `count` bytes. Throws ConfigError if it is negative.
  explicit Bytes(int64_t count);

  /// Reads "2048", "64 KiB", "1.5GiB", "300MB" or "unlimited", in upper or lower case. KB, MB, GB and TB are powers
  /// of 1000; KiB, MiB, GiB and TiB, and the single letters K, M, G and T, are powers of 1024 (as in GNU coreutils).
  /// A fraction of a byte is rounded to the nearest. Throws ConfigError for anything else and for what overflows.
  static Bytes parse(std::string_view text);

  /// More than any machine has: a budget or limit that is never reached.
  static Bytes unlimited();

  /// Whether it is unlimited().
  bool is_unlimited() const { return count_ == kUnlimited; }

  /// In bytes. An unlimited amount gives the largest int64_t, so that `used <= budget.count()` holds for every `used`.
  int64_t count() const { return count_; }

  /// For people: "512 B", "1.50 GiB" (two decimals, powers of 1024), "unlimited".
  std::string str() const;

  friend auto operator<=>(const Bytes&, const Bytes&) = default;

 private:
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  int64_t count_;
};

}  // namespace snug
