#pragma once
// The errors that snug throws: one family, so that a program can catch snug::Error once at the top.
//
//   throw snug::ConfigError(fmt::format("Stepper: micro_batch is {}; give a number >= 1", n));
//
// A message reads "module.function: what happened, with the values; the likely cure".

#include <stdexcept>
#include <string>

#include "snug/core/bytes.h"

namespace snug {

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

/// A limit below what is taken already, by tensors and by gaps between them. is_out_of_memory() is true of it.
class LimitBelowUse : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

/// A file whose content does not follow its format. The message names the file.
class CorruptFile : public Error {
 public:
  using Error::Error;
};

/// A step that does not fit into the number of bytes it was given.
class BudgetExceeded : public Error {
 public:
  explicit BudgetExceeded(const std::string& message, Bytes smallest_feasible = Bytes(0))
      : Error(message), smallest_feasible_(smallest_feasible) {}

  /// The smallest budget for which a plan was found, or, where the whole could not run, for which its parts tell that
  /// there is one. 0: it is not known, since nothing is run beyond the budget to find out.
  Bytes smallest_feasible() const noexcept { return smallest_feasible_; }

 private:
  Bytes smallest_feasible_;
};

/// A process group that cannot be formed or has lost a member.
class DistributedError : public Error {
 public:
  using Error::Error;
};

/// Infinite or NaN values where finite ones are needed to go on.
class NonFinite : public Error {
 public:
  using Error::Error;
};

}  // namespace snug
