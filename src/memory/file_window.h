#pragma once
// FileWindow: tensors in files (AllocationsInFile), of which few bytes are in memory at a time.
//
// Problem: the weights of a model may be larger than the budget, and every operator needs its operands in memory.
// Options: copy weights in and out by hand, leave the choice of pages to the system, or follow the operators. Copies
// need changes to the model. The system does not know the budget: pages stay in memory until the whole machine needs
// memory.
// Choice: FileWindow follows the operators. The operator seam (operator_mode.h) shows every operator that
// reads or writes values, in forward, in backward and in replays alike. The operands of an operator come in when the
// operator runs. The storage used longest ago goes out to make room. A step uses storages in the same order again and
// again, so the order since the last let_go() predicts the next storage to read ahead. Consequence: if the operands of
// an operator are larger than the window, the excess counts as an allocation while the operator runs. Code outside
// operators, such as a program that prints a weight, also reads the tensors: the system brings in the pages, and the
// pages leave at the next let_go().

#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include "src/memory/cpu_allocator.h"

namespace snug::detail {

class FileWindow final {
 public:
  /// Lets go of all pages of `storages`, which are in files. The window is as large as the largest storage. The
  /// window's bytes count as one allocation until the end of the window's life, so the constructor throws as an
  /// allocation of these bytes throws.
  explicit FileWindow(std::vector<c10::Storage> storages);
  ~FileWindow();
  FileWindow(const FileWindow&) = delete;
  FileWindow& operator=(const FileWindow&) = delete;

  /// Takes all pages out of memory. From here on, the window expects storages in the order in which storages came in
  /// since the last call, and reads ahead.
  void let_go();

  static int64_t bytes_for(const std::vector<c10::Storage>& storages);

 private:
  friend class OperandsInFile;

  struct Entry {
    c10::Storage storage;
    int64_t bytes;
    bool is_in;
    int64_t used;                    // number of the last operator that used the storage
    std::list<int>::iterator place;  // in by_use_, if is_in
  };

  void begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void end();
  void use(const c10::StorageImpl* storage);
  void bring(int number);
  void trim();

  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, int> numbers_;
  const int64_t bytes_;  // of the window
  CountedBytes counted_;
  std::mutex mutex_;                    // guards the members below; locked only before and after a kernel
  std::list<int> by_use_;               // entries in memory, the latest used first
  int64_t in_ = 0;                      // bytes of the entries in by_use_
  int64_t now_ = 0;                     // number of the operator under way
  std::optional<CountedBytes> excess_;  // of an operator whose operands are larger than the window
  std::vector<int> came_, foreseen_;    // entries in order of arrival: since the last let_go(), and before
};

/// A scope around a kernel. Costs nothing without a FileWindow.
class OperandsInFile final {
 public:
  /// Throws as an allocation throws, if the operands are larger than the window and the excess does not fit.
  OperandsInFile(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  ~OperandsInFile();
  OperandsInFile(const OperandsInFile&) = delete;
  OperandsInFile& operator=(const OperandsInFile&) = delete;

 private:
  bool has_begun_ = false;
};

}  // namespace snug::detail
