#pragma once
// Writers: the processes that write a file together.
//
// Problem: the tensors of a run on several ranks are in parts on the ranks.
// Options: one rank gathers and writes all, each rank writes a file of its own, or each rank writes its parts of one
// file. A rank that gathers waits for the network, and writes alone. Files of their own must be joined by readers.
// Choice: parts of one file. The sizes of all parts are known before the first byte is written, so each process writes
// at the places of its parts. Code that writes tensors asks Writers::now(); the base class is a process that is alone.
// Consequence: all processes must see the file.

#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/core/replaced.h"

namespace snug::detail {

class Writers {
 public:
  /// Bytes of a tensor. The parts of a tensor follow each other in the order of elements.
  struct Part {
    int64_t bytes;
    at::Tensor values;  // undefined: another process writes the part
  };

  virtual ~Writers() = default;
  /// Whether this process writes what is no part of a tensor, and gives files their names.
  virtual bool is_first() const { return true; }
  virtual std::vector<Part> parts_of(const at::Tensor& tensor) const {
    return {{static_cast<int64_t>(tensor.nbytes()), tensor}};
  }
  /// Adds up the numbers of all processes, in place. Called by all processes, as agree() is.
  virtual void add_up(std::span<int64_t>) {}
  /// `failure`: the exception that this process has caught, or null. Rethrows the exception; throws if another process
  /// has one.
  virtual void agree(const std::exception_ptr& failure) {
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  /// Calls `work`, and throws on all processes if `work` throws on one.
  template <class F>
  void together(F&& work) {
    std::exception_ptr failure;
    try {
      std::forward<F>(work)();
    } catch (...) {
      failure = std::current_exception();
    }
    agree(failure);
  }
  /// The same, and only the first process calls `work`.
  template <class F>
  void first(F&& work) {
    together([&] {
      if (is_first()) {
        std::forward<F>(work)();
      }
    });
  }

  /// The writers of this thread.
  static Writers& now() noexcept { return are_several() ? *current_ : alone(); }
  static bool are_several() noexcept { return current_ != nullptr; }

 private:
  friend class WritingTogether;
  static Writers& alone() noexcept {
    static Writers one;
    return one;
  }

  static inline thread_local Writers* current_ = nullptr;
};

/// In the scope, this thread writes files as one of `writers`.
class [[nodiscard]] WritingTogether final {
 public:
  explicit WritingTogether(Writers& writers) : current_(Writers::current_, &writers) {}

 private:
  Replaced<Writers*> current_;
};

}  // namespace snug::detail
