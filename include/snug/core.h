#pragma once
// Bytes: an amount of memory, so that budgets and limits are never confused with counts of other things.
//
//   snug::Bytes budget = snug::Bytes::parse("1.5GiB");
//   if (snug::Bytes(used) > budget) { ... budget.str() ... }      // "1.50 GiB"
//   snug::Bytes limit = snug::live_bytes(torch::kCPU) + budget * 0.6;
//
// Bytes::unlimited() compares greater than every other amount, so "no limit" needs no special case.
//
// The errors that snug throws: a single family, so a program can catch snug::Error once at the top.
//
//   throw snug::ConfigError(fmt::format("Stepper: micro_batch is {}; give a number >= 1", n));
//
// A message reads "module.function: what happened, with the values; the likely cure".
//
// Reduction: how several values become a single value: the items of a loss, or the ranks' gradients.

#include <compare>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

namespace snug {

class Bytes {
 public:
  /// `count` bytes. Throws ConfigError if `count` is negative.
  explicit Bytes(int64_t count);

  /// Reads "2048", "64 KiB", "1.5GiB", "300MB" or "unlimited", in upper or lower case. KB, MB, GB and TB are powers of
  /// 1000; KiB, MiB, GiB and TiB, and the single letters K, M, G and T, are powers of 1024 (as in GNU coreutils).
  /// A fraction of a byte is rounded to the nearest byte. Throws ConfigError for any other text, and for amounts that
  /// overflow.
  static Bytes parse(std::string_view text);

  /// More than any machine has: a budget or limit that is never reached.
  static Bytes unlimited();

  /// Whether the amount is unlimited().
  bool is_unlimited() const { return count_ == kUnlimited; }

  /// In bytes. An unlimited amount gives the largest int64_t, so that `used <= budget.count()` holds for every `used`.
  int64_t count() const { return count_; }

  /// For people: "512 B", "1.50 GiB" (two decimals, powers of 1024), "unlimited".
  std::string str() const;

  friend auto operator<=>(const Bytes&, const Bytes&) = default;

  /// Sums and products that are more than a 64-bit number of bytes holds are unlimited(). unlimited() stays unlimited()
  /// in sums, in products with a number above 0, and less any other amount.
  friend Bytes operator+(Bytes a, Bytes b);
  /// Throws ConfigError if the difference is below 0, or if `b` is unlimited().
  friend Bytes operator-(Bytes a, Bytes b);
  /// The nearest whole number of bytes. Exact for whole numbers and results below 8 PiB, which a double holds. Throws
  /// ConfigError unless `factor` is finite and >= 0.
  friend Bytes operator*(Bytes bytes, double factor);
  /// The same as the product with the inverse of `divisor`, but rounded once. Throws ConfigError unless `divisor` is
  /// finite and > 0.
  friend Bytes operator/(Bytes bytes, double divisor);

 private:
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  int64_t count_;
};

/// The base of all exceptions that snug throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An option, argument or call order that cannot work.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A file whose content does not follow the file's format. The message names the file.
class CorruptFile : public Error {
 public:
  using Error::Error;
};

/// A step that does not fit into the given number of bytes.
class BudgetExceeded : public Error {
 public:
  explicit BudgetExceeded(const std::string& message, Bytes smallest_feasible = Bytes(0))
      : Error(message), smallest_feasible_(smallest_feasible) {}

  /// The smallest budget for which a plan was found. If the whole step could not run, the smallest budget for which a
  /// plan exists according to profiles of parts of the step. 0: unknown, because nothing runs beyond the budget to find
  /// the number out.
  Bytes smallest_feasible() const noexcept { return smallest_feasible_; }

 private:
  Bytes smallest_feasible_;
};

/// A process group that cannot be formed or has lost a member.
class DistributedError : public Error {
 public:
  using Error::Error;
};

/// Infinite or NaN values, although only finite values allow the work to go on.
class NonFinite : public Error {
 public:
  using Error::Error;
};

enum class Reduction { Sum, Mean };

}  // namespace snug
