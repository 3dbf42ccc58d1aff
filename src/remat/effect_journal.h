#pragma once
// EffectJournal: notes the changes that a step makes outside of the step, and takes the changes back. One journal
// serves all runs that may be taken back: trials of a step that is planned, a failed try, and the tries after the
// failure.
//
// Problem: a model is user code and changes state that nobody lists. Copying all parameters and buffers before each run
// would double the memory of the model.
//
// Choice: state is noted when the step changes the state. A step changes the outside in six ways:
//
// - An operator writes to memory from before the step: running statistics, a counter, a mask, a parameter. The seam
//   below autograd shows each write before the write is made. So memory is copied at the first write, and memory that
//   no step writes is never copied. Memory is put back with the memory's size, whatever tensors lie on the memory.
// - A tensor moves to other memory, or gets other sizes: set_data(), resize_(), operators with `out`. The journal notes
//   how registered buffers and tensors that operators write look at their memory, sparse tensors included.
// - A backward pass leaves gradients in leaves. The engine shows each pass before the pass runs (backward_pass.h), also
//   a pass inside the forward pass. The journal notes the leaves that the pass reaches, with the gradients of that
//   moment.
// - The default generators move on. So does the state of a language that snug is bound to (OtherState).
// - The program assigns other tensors to variables named by the program (BudgetOptions::carried).
// - Memory made by a forward pass stays with the program: a cache, a result that is looked at later. The memory is the
//   program's; the journal does nothing about the memory.
//
// Consequence: changes that no seam shows are not taken back:
//
// - writes without an operator, through a pointer;
// - work of other threads that the forward pass starts;
// - writes to memory of the program on which the step itself puts a tensor (from_blob), if the tensor is gone when the
//   step ends;
// - in the outermost backward pass, writes to anything but registered buffers and gradients.

#include <any>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>

#include "snug/state.h"
#include "src/memory/backward_pass.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

class EffectJournal final : private OperatorPolicy, private BackwardObserver {
 public:
  /// A closed journal: nothing is noted before begin().
  EffectJournal() = default;
  ~EffectJournal() override = default;
  EffectJournal(const EffectJournal&) = delete;
  EffectJournal& operator=(const EffectJournal&) = delete;

  /// Opens the journal: take_back() goes back to the state of now. `registered`: buffers of the model. `carried` must
  /// outlive the journal.
  void begin(const std::vector<at::Tensor>& registered = {}, const std::vector<at::Tensor*>& carried = {});
  /// Closes the journal: nothing can be taken back any more.
  void end();
  bool is_open() const { return generators_.has_value(); }

  /// While a Run lives, effects of this thread are noted. The forward pass comes first. Throws as an allocation does,
  /// from within operators and backward passes.
  class Run {
   public:
    /// `drops_gradient`: leaves whose gradients need not be noted, because the caller drops the gradients; empty: all
    /// gradients are noted.
    explicit Run(EffectJournal& journal, std::function<bool(const at::Tensor& leaf)> drops_gradient = {});
    ~Run() { journal_.drops_gradient_ = {}; }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    /// Begins another forward pass.
    void begin_forward();
    /// The forward pass is over. From here on, operators are seen only if registered buffers exist.
    void begin_backward();

   private:
    EffectJournal& journal_;
    std::optional<OperatorScope> operators_;
    BackwardObserverScope passes_;
  };

  /// Notes the gradients of `leaves`, as a backward pass to the leaves does.
  void note_gradients(const std::vector<at::Tensor>& leaves);
  /// From here on, the caller drops the gradients of the leaves for which `of` returns true. Gives up the copies.
  void forget_gradients(const std::function<bool(const at::Tensor& leaf)>& of);
  /// Puts everything back as at begin(). Exception: a tensor that has another kind now cannot be put back.
  void take_back();

  /// The bytes of the copies in the journal.
  int64_t bytes() const { return bytes_; }
  /// The bytes of the copies that the journal will hold in a later step, when zeros have become other values and leaves
  /// have gradients.
  int64_t bytes_to_come() const;
  /// Whether the latest run has written to memory from before the run.
  bool has_written(const at::Tensor& tensor) const;
  bool has_written(const c10::StorageImpl* memory) const;
  /// The memory that the latest run has written.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> written() const;
  bool is_registered(const at::Tensor& tensor) const;

 private:
  // The memory of a storage. No other storage gets the address while the memory is noted.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t bytes;
    at::Tensor values;  // undefined: zeros, or no values
    bool is_in_latest_run;
  };
  // How a tensor looked at the tensor's memory. `before` holds the memory only for registered tensors and for tensors
  // that are not strided: the owner of other memory may take the memory back.
  struct View {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    at::Tensor before;
    const c10::StorageImpl* memory;  // by address
    bool holds_memory;
  };
  // The gradient of a leaf. The step may have made the leaf, and the leaf may be gone with the step's results.
  struct Gradient {
    c10::weak_intrusive_ptr<c10::TensorImpl> leaf;
    at::Tensor gradient, values;  // undefined values: zeros
  };

  void call(const OperatorCall& call, Stack& stack) override;
  void before_unseen_write(const at::Tensor& tensor) override { note_write(tensor); }
  void before_pass(const torch::autograd::edge_list& roots) override;

  void forget_what_is_gone();
  void note_write(const at::Tensor& tensor);
  void note_memory(const at::Tensor& tensor);
  void note_view(const at::Tensor& tensor);
  void note_results(const Stack& stack, size_t first);
  at::Tensor copy_of(const at::Tensor& tensor);
  static int64_t bytes_of(const at::Tensor& copy);
  static void restore(const Memory& memory);
  static void restore(const View& view);
  static void restore(const Gradient& gradient);

  std::optional<RngState> generators_;
  std::any other_state_;
  std::vector<std::pair<at::Tensor*, at::Tensor>> carried_;  // a variable, and the tensor in the variable at begin()
  std::unordered_map<const c10::StorageImpl*, Memory> memory_;
  std::unordered_map<const void*, View> views_;
  std::unordered_map<const void*, Gradient> gradients_;
  std::unordered_set<const void*> registered_;  // tensors
  std::unordered_set<const c10::StorageImpl*> registered_memory_;
  std::function<bool(const at::Tensor&)> drops_gradient_;
  // Memory that operators of the latest run have made. An address may belong to memory that is gone; then any later
  // memory at the address is new, too.
  ska::flat_hash_set<const c10::StorageImpl*> made_;
  bool is_forward_ = true;
  int64_t bytes_ = 0;
};

}  // namespace snug::detail
