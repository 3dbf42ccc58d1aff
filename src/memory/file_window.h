#pragma once
// FileWindow: tensors in files (AllocationsInFile), of which few bytes are in memory at a time. What an operator takes
// comes in when it runs; what was taken longest ago goes out for it. The operator seam says what runs, forward,
// backward and replays alike. Code that is no operator, such as a program that prints a weight, finds the tensors there
// as well: the system brings in the pages that it reads, and they leave at the next let_go().

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
  /// Nothing of `storages`, which are in files, is in memory then. The window is as large as the largest of them.
  /// Throws as an allocation of its bytes does, since these count as one for as long as it lives.
  explicit FileWindow(std::vector<c10::Storage> storages);
  ~FileWindow();
  FileWindow(const FileWindow&) = delete;
  FileWindow& operator=(const FileWindow&) = delete;

  /// All goes out. What comes in from here on is foreseen as it came since the last call, and read ahead.
  void let_go();

  static int64_t bytes_for(const std::vector<c10::Storage>& storages);

 private:
  friend class OperandsInFile;

  struct Entry {
    c10::Storage storage;
    int64_t bytes;
    bool is_in;
    int64_t used;                    // by the operator of that number
    std::list<int>::iterator place;  // in by_use_, if it is in
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
  std::mutex mutex_;                    // guards what follows; an operator holds it only before and after its kernel
  std::list<int> by_use_;               // what is in, the latest first
  int64_t in_ = 0;                      // bytes of them
  int64_t now_ = 0;                     // number of the operator under way
  std::optional<CountedBytes> excess_;  // of one whose operands are larger than the window
  std::vector<int> came_, foreseen_;    // since the last let_go(), and before it
};

/// Around a kernel. Costs nothing where there is no FileWindow.
class OperandsInFile final {
 public:
  /// Throws as an allocation does, if the operands are larger than the window and that does not fit.
  OperandsInFile(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  ~OperandsInFile();
  OperandsInFile(const OperandsInFile&) = delete;
  OperandsInFile& operator=(const OperandsInFile&) = delete;

 private:
  bool has_begun_ = false;
};

}  // namespace snug::detail
