#pragma once
// WeightWindow: the weights of a model, of which few are in the memory of the operators at a time.
//
// Problem: the weights of a model may be larger than the budget, and every operator needs its operands in memory.
// Options: copy weights in and out by hand, leave the choice of pages to the system, or follow the operators. Copies
// need changes to the model. The system does not know the budget: pages stay in memory until the whole machine needs
// memory.
// Choice: WeightWindow follows the operators. The operator seam (operator_mode.h) shows every operator that
// reads or writes values, in forward, in backward and in replays alike. The operands of an operator come in when the
// operator runs. A step uses storages in the same order again and again, so the order since the last let_go() predicts
// the next uses. The storage whose next use is farthest goes out to make room (Belady's rule), and storages come in
// ahead of their operators, if the home (WeightHome) can bring beside operators. From the first use in another order
// on, until the next let_go(), storages come at their use, and the storage used longest ago goes out. The home says
// what coming in and going out are. Consequence: if the operands of an operator are larger than the window, the excess
// is in memory, too, while the operator runs.

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include "src/core/replaced.h"
#include "src/memory/cpu_allocator.h"

namespace snug::detail {

/// Where the weights are while no operator uses the weights. Numbers are places in the list of the window's storages.
/// Operators that a home calls are not seen by any window.
class WeightHome {
 public:
  virtual ~WeightHome() = default;
  /// Whether the storage has room beside the storages that are in. If not, storages go out. If that does not help, the
  /// storage comes in all the same, and goes out when the operator has run.
  virtual bool has_room(size_t) const { return true; }
  /// The storage has memory when the call returns. May throw; then the storage is out.
  virtual void bring(size_t number) = 0;
  /// The storage is in, and an operator that begins now uses the storage: the memory has the values, in the order of
  /// the current stream. May throw.
  virtual void use(size_t) {}
  /// `is_written`: an operator has written to the storage since bring(). At WeightWindow::let_go(), also called for
  /// storages that are out. A throw leaves the storage in.
  virtual void let_go(size_t number, bool is_written) = 0;
  /// Whether bring() goes on beside operators that do not use the storage. Then the window calls bring() ahead.
  virtual bool brings_beside_operators() const { return false; }
  /// Returns when no copy of a storage that is out uses the values any more.
  virtual void finish_copies(size_t) {}
  /// A hint: bring(number) comes soon. Only if not brings_beside_operators().
  virtual void read_ahead(size_t) {}
  /// The storages that are in take `bytes` more than the window; 0: no longer. May throw.
  virtual void exceed(int64_t) {}
};

/// A home whose storages, while they are in, have memory of the CPU that counts as one allocation: the window's bytes,
/// used or not, and the bytes beyond. So the bytes of a step follow from the step's operators alone.
class CountedHome : public WeightHome {
 public:
  /// Throws as an allocation of the window's bytes throws.
  explicit CountedHome(int64_t window) : counted_(window) {}
  void exceed(int64_t bytes) override;
  /// The window is `bytes` larger than at first. Throws as an allocation does; then the window is as at first.
  void widen(int64_t bytes);

 private:
  CountedBytes counted_;
  std::optional<CountedBytes> more_, excess_;
};

/// The home of storages that lie in mapped files (AllocationsInFile): the system brings the pages. Code outside
/// operators, such as a program that prints a weight, also reads the tensors, and the pages leave at the next let_go().
class FileHome final : public CountedHome {
 public:
  FileHome(std::vector<c10::Storage> storages, int64_t window) : CountedHome(window), storages_(std::move(storages)) {}

  void bring(size_t) override {}
  void let_go(size_t number, bool is_written) override;
  void read_ahead(size_t number) override;  // into the system's cache

 private:
  std::vector<c10::Storage> storages_;
};

class WeightWindow final {
 public:
  /// Lets go of all `storages`. At most `bytes` of the storages are in at a time, if each operator's operands fit.
  /// `home` must outlive the window.
  WeightWindow(std::vector<c10::Storage> storages, WeightHome& home, int64_t bytes);
  /// Leaves all storages as they are, in or out.
  ~WeightWindow();
  WeightWindow(const WeightWindow&) = delete;
  WeightWindow& operator=(const WeightWindow&) = delete;

  /// Takes all storages out. From here on, the window expects uses in the order of the uses since the last call. No
  /// operator may be using a storage of the window.
  void let_go();

  int64_t bytes() const { return bytes_; }
  /// All storages must be out, as after let_go().
  void resize(int64_t bytes) { bytes_ = bytes; }
  /// Whether the window should become `more` bytes larger than its least bytes, instead of `spare` bytes larger. A
  /// small gain is not worth that all storages go out.
  bool should_widen(int64_t spare, int64_t more) const { return more < spare || more - spare > bytes_ / 16; }

  /// Room for `count` of the largest storage, or for all storages if they are fewer bytes. The room of a storage is a
  /// multiple of `multiple`.
  static int64_t bytes_for(const std::vector<c10::Storage>& storages, int64_t count = 1, int64_t multiple = 1);
  /// Whether the process has a window.
  static bool exists() noexcept;

 private:
  friend class OperandsInWindow;
  friend void note_written_weight(const at::Tensor& tensor);
  friend at::Tensor values_at_home(const at::Tensor& weight);

  struct Entry {
    c10::Storage storage;
    int64_t bytes;
    bool is_in = false;
    bool is_written = false;
    bool is_beside = false;             // in, without room in the window
    int users = 0;                      // operators under way
    std::list<size_t>::iterator place;  // in by_use_, if is_in
    std::vector<size_t> uses = {};      // positions in foreseen_
  };

  std::vector<size_t> begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void end(const std::vector<size_t>& operands) noexcept;
  void finish(const std::vector<size_t>& operands) noexcept;
  void tell_excess();
  void note_use(size_t number);
  void bring(size_t number);
  void bring_ahead();
  void enter(size_t number);
  void make_room(int64_t bytes);
  bool has_room(size_t number) const;
  size_t next_use(size_t number) const;
  void take_out(size_t number);
  void take_home(const c10::Storage& storage);
  bool take_one_used_after(std::optional<size_t> position);

  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, size_t> numbers_;
  WeightHome& home_;
  int64_t bytes_;                        // of the window
  std::mutex mutex_;                     // guards the members below; locked only before and after a kernel
  std::list<size_t> by_use_;             // entries that are in, the latest used first
  int64_t in_ = 0;                       // bytes of the entries in by_use_
  int64_t excess_ = 0;                   // as the home was told
  std::vector<size_t> used_, foreseen_;  // entries in order of use: since the last let_go(), and before
  size_t at_ = 0;                        // uses of foreseen_ that have come; all of them after a use in another order
  size_t ahead_ = 0;                     // uses of foreseen_ before this one were brought ahead
};

/// A scope around a kernel. Costs nothing without a WeightWindow.
class [[nodiscard]] OperandsInWindow final {
 public:
  /// Throws as the homes of windows throw.
  OperandsInWindow(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  ~OperandsInWindow();
  OperandsInWindow(const OperandsInWindow&) = delete;
  OperandsInWindow& operator=(const OperandsInWindow&) = delete;

 private:
  void end() noexcept;

  std::vector<std::pair<WeightWindow*, std::vector<size_t>>> begun_;
};

/// Hides the operators that this thread calls from all windows, until the end of the scope. Meant for homes, outside of
/// the calls of a window.
class [[nodiscard]] UnseenByWindows final {
 public:
  UnseenByWindows();

 private:
  Replaced<bool> is_moving_;
};

/// The values that the storage of a weight keeps in the host's memory (kept_values): a CPU tensor like `weight`, until
/// an operator uses the weight, with late writes (LateWrites). Undefined for other tensors. The weight is out, so code
/// may write the values instead.
at::Tensor values_at_home(const at::Tensor& weight);

/// Tells windows about code that is no operator and has written to `tensor`.
void note_written_weight(const at::Tensor& tensor);

}  // namespace snug::detail
