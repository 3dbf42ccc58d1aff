// snug formats: the float formats as a table, and a number rounded to each format. Every figure is computed.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "program/command.h"
#include "program/float_format.h"
#include "snug/core.h"

namespace snug::cli {
namespace {

// Reads a decimal, scientific or hexadecimal number with a sign, inf or nan, in any locale.
double parse_number(const std::string& text) {
  const bool has_sign = !text.empty() && (text.front() == '-' || text.front() == '+');
  std::string_view rest = std::string_view(text).substr(has_sign ? 1 : 0);
  const bool is_hex = rest.starts_with("0x") || rest.starts_with("0X");
  rest.remove_prefix(is_hex ? 2 : 0);
  // from_chars accepts a second minus, and words after 0x.
  const bool can_begin = !rest.starts_with('-') && !(is_hex && rest.find_first_of("iInN") == 0);
  double number = 0;
  const char* const end = rest.data() + rest.size();
  const auto parsed =
      std::from_chars(rest.data(), end, number, is_hex ? std::chars_format::hex : std::chars_format::general);
  if (!can_begin || parsed.ec == std::errc::invalid_argument || parsed.ptr != end) {
    throw ConfigError(
        fmt::format("formats: '{}' is not a number; give one such as 0.1, -1e-8, 0x1.8p-3, inf or nan", text));
  }
  if (parsed.ec == std::errc::result_out_of_range) {
    throw ConfigError(fmt::format(
        "formats: '{}' is outside the range of FP64, which holds 4.9e-324 to 1.8e+308; give another", text));
  }
  return has_sign && text.front() == '-' ? -number : number;
}

// Enough digits to tell the format's numbers apart, and at least five.
std::string shown(const FloatFormat& format, double value) {
  return std::isnan(value) ? "nan" : fmt::format("{:.{}g}", value, std::max(5, format.digits_to_tell_apart()));
}

std::string shown_error(double error) {
  if (!std::isfinite(error)) {
    return "-";
  }
  return error == 0 ? "0" : fmt::format("{:.1e}", error);
}

// Exponents end and fractions begin in the same column of each line, as wide as FP32's exponents and fractions.
std::string drawn(std::string_view sign, std::string_view exponent, std::string_view fraction) {
  return fmt::format("{} | {:>{}} | {:<{}}", sign, exponent, kFp32.exponent_bits, fraction, kFp32.fraction_bits);
}

void print_layouts() {
  fmt::print("Bits: s sign, e exponent, f fraction\n\n");
  for (const FloatFormat& f : kFloatFormats) {
    fmt::print("{:<8}  {}  {:>2} bits, exponents {} to {}\n", f.name,
               drawn("s", std::string(static_cast<size_t>(f.exponent_bits), 'e'),
                     std::string(static_cast<size_t>(f.fraction_bits), 'f')),
               f.bits(), f.min_exponent(), f.max_exponent());
  }
}

void print_ranges() {
  fmt::print("\n{:<8}  {:>10}  {:>15}  {:>18}  {:>22}  {:>6}\n", "", "largest", "smallest normal", "smallest subnormal",
             "1 to the next: epsilon", "digits");
  for (const FloatFormat& f : kFloatFormats) {
    fmt::print("{:<8}  {:>10.5g}  {:>15.5g}  {:>18.5g}  {:>22.5g}  {:>6.1f}\n", f.name, f.max(), f.min_normal(),
               f.min_subnormal(), f.epsilon(), f.decimal_digits());
  }
}

void demonstrate(std::string_view expression, double number, const std::vector<FloatFormat>& formats) {
  std::string line = fmt::format("  {:<10}", expression);
  for (const FloatFormat& format : formats) {
    const RoundedFloat rounded = round_to(format, number);
    const std::string result = fmt::format("{} ({})", shown(format, rounded.value), to_string(rounded.verdict));
    line += fmt::format("  {:<8}  {:<22}", format.name, result);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", line);
}

void print_demonstrations() {
  fmt::print("\nOverflow: larger than the exponent can say. FP8 E4M3 has no infinity: it stays at its largest.\n");
  demonstrate("70000", 70000, {kFp16, kBf16});
  demonstrate("500", 500, {kFp8E4m3, kFp8E5m2});
  demonstrate("1e39", 1e39, {kFp32, kBf16});
  fmt::print("\nUnderflow: smaller than the exponent can say; just above, numbers lose fraction bits (subnormal).\n");
  demonstrate("1e-8", 1e-8, {kFp16, kBf16});
  demonstrate("1e-6", 1e-6, {kFp16, kBf16});
  demonstrate("1e-46", 1e-46, {kFp32, kBf16});
  fmt::print("\nRounding: finer than the fraction can say, so that a small change is lost.\n");
  demonstrate("2048 + 1", 2048 + 1, {kFp16, kFp32});
  demonstrate("1 - 1e-4", 1 - 1e-4, {kBf16, kFp32});
  fmt::print("\n1 + 2^-k is told from 1 up to this k:\n");
  for (const FloatFormat& format : kFloatFormats) {
    const auto sum = [&](int k) { return round_to(format, 1 + std::ldexp(1.0, -k)).value; };
    int k = 0;
    while (sum(k + 1) != 1) {
      ++k;
    }
    fmt::print("  {:<8}  1 + 2^-{:<2} = {:<18}  1 + 2^-{:<2} = {}\n", format.name, k, sum(k), k + 1, sum(k + 1));
  }
}

void print_number(const std::string& text) {
  const double x = parse_number(text);
  fmt::print("{}, in FP64 {}, and nearest to it:\n\n", text, std::isnan(x) ? "nan" : fmt::format("{}", x));
  fmt::print("{:<8}  {}  {:>15}  {:>9}  {:>8}  verdict\n", "", drawn("s", "exponent", "fraction"), "value", "error",
             "relative");
  for (const FloatFormat& f : kFloatFormats) {
    const RoundedFloat r = round_to(f, x);
    fmt::print("{:<8}  {}  {:>15}  {:>9}  {:>8}  {}\n", f.name,
               drawn(fmt::to_string(r.bits.sign), fmt::format("{:0{}b}", r.bits.exponent, f.exponent_bits),
                     fmt::format("{:0{}b}", r.bits.fraction, f.fraction_bits)),
               shown(f, r.value), shown_error(r.error), shown_error(r.relative_error), to_string(r.verdict));
  }
}

void run_formats(const std::vector<std::string>& numbers) {
  if (numbers.size() > 1) {
    throw ConfigError(fmt::format("formats: takes one NUMBER, and '{}' is a second", numbers[1]));
  }
  if (!numbers.empty()) {
    print_number(numbers.front());
    return;
  }
  print_layouts();
  print_ranges();
  print_demonstrations();
}

}  // namespace

void add_formats(CLI::App& app) {
  CLI::App* command = app.add_subcommand("formats", "Show float formats, or what a number becomes in each");
  const auto numbers = std::make_shared<std::vector<std::string>>();
  // expected(1): otherwise CLI11 hands the words after a -- to the program instead of the command.
  command->add_option("NUMBER", *numbers, "Such as 0.1, -1e-8, 0x1.8p-3, inf or nan; none: tables and examples")
      ->type_name("")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  // -inf and -.5 look like options. A word that looks like an option and is not an option is a number or an error.
  command->prefix_command();
  command->callback([command, numbers] {
    std::vector<std::string> words = *numbers;
    const auto more = command->remaining();
    words.insert(words.end(), more.begin(), more.end());
    run_formats(words);
  });
}

}  // namespace snug::cli
