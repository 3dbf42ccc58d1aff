#pragma once
// EffectJournal: what a step changes outside of itself, noted so that it can be taken back. One journal serves all that
// may be taken back: the trials of a step that is planned, a try that failed, and the tries after it.
//
// A step changes the outside in six ways:
//
// - An operator writes to memory that was there before: running statistics, a counter, a mask, a parameter. The seam
//   below autograd shows each write before it is made, so memory is copied when it is first written, and what no step
//   writes is never copied. Memory is put back with its size, whatever tensors lie on it.
// - A tensor is put on other memory, or gets other sizes: set_data(), resize_(), operators with `out`. Registered
//   buffers and tensors that operators write are noted as they look at their memory; sparse tensors too.
// - A backward pass leaves gradients in leaves. The engine shows each pass before it runs (backward_pass.h), also one
//   inside the forward pass: the leaves that it reaches are noted, with the gradients that they have by then.
// - The default generators move on, and what a language keeps that snug is bound to (OtherState).
// - The program assigns tensors anew that it has named (StepperOptions::carried).
// - Memory that a forward pass makes stays in the program's hands: a cache, a result that is looked at later. That is
//   the program's; nothing is done about it.
//
// Not seen are
//
// - writes that no operator makes, through a pointer;
// - what other threads do that the forward pass starts;
// - writes to memory of the program on which the step itself puts a tensor (from_blob) that is gone when it ends;
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
  /// Nothing is noted yet.
  EffectJournal() = default;
  ~EffectJournal() override = default;
  EffectJournal(const EffectJournal&) = delete;
  EffectJournal& operator=(const EffectJournal&) = delete;

  /// What take_back() goes back to is now. `registered`: buffers of the model. `carried` must outlive the journal.
  void begin(const std::vector<at::Tensor>& registered = {}, const std::vector<at::Tensor*>& carried = {});
  /// Nothing can be taken back any more.
  void end();
  bool is_open() const { return generators_.has_value(); }

  /// While it lives, effects of this thread are noted. The forward pass comes first. Throws as an allocation does, from
  /// within operators and backward passes.
  class Run {
   public:
    /// `drops_gradient`: leaves whose gradients need not be noted, as the caller drops them; none: all are noted.
    explicit Run(EffectJournal& journal, std::function<bool(const at::Tensor& leaf)> drops_gradient = {});
    ~Run() { journal_.drops_gradient_ = {}; }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    /// Another forward pass.
    void begin_forward();
    /// The forward pass is over. From here on operators are seen only if there are registered buffers.
    void begin_backward();

   private:
    EffectJournal& journal_;
    std::optional<OperatorScope> operators_;
    BackwardObserverScope passes_;
  };

  /// Notes the gradients of these leaves, as a backward pass to them does.
  void note_gradients(const std::vector<at::Tensor>& leaves);
  /// From here on these are the caller's to drop. Gives up their copies.
  void forget_gradients(const std::function<bool(const at::Tensor& leaf)>& of);
  /// All is as it was at begin(), but for what nobody can put back: a tensor that is of another kind now.
  void take_back();

  /// Of the copies that it holds.
  int64_t bytes() const { return bytes_; }
  /// Of those that a later step will hold, when zeros have become other values and leaves have gradients.
  int64_t bytes_to_come() const;
  /// Whether the latest run has written to memory that was there before the run.
  bool has_written(const at::Tensor& tensor) const;
  bool has_written(const c10::StorageImpl* memory) const;
  /// The memory that it has written.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> written() const;
  bool is_registered(const at::Tensor& tensor) const;

 private:
  // The memory of a storage. No other storage has its address while it is noted.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t bytes;
    at::Tensor values;  // undefined: zeros, or none
    bool is_in_latest_run;
  };
  // How a tensor looked at its memory. Only of a registered one `before` holds the memory: another's owner may take it
  // back.
  struct View {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    at::Tensor before;
    const c10::StorageImpl* memory;  // by its name
    bool holds_memory;
  };
  // Of a leaf that the step may have made itself, and that is gone with what it was made for.
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
  std::vector<std::pair<at::Tensor*, at::Tensor>> carried_;  // and what was there
  std::unordered_map<const c10::StorageImpl*, Memory> memory_;
  std::unordered_map<const void*, View> views_;
  std::unordered_map<const void*, Gradient> gradients_;
  std::unordered_set<const void*> registered_;  // tensors
  std::unordered_set<const c10::StorageImpl*> registered_memory_;
  std::function<bool(const at::Tensor&)> drops_gradient_;
  // Memory that operators of the latest run have made. The address of one that is gone is that of memory which is as
  // new.
  ska::flat_hash_set<const c10::StorageImpl*> made_;
  bool is_forward_ = true;
  int64_t bytes_ = 0;
};

}  // namespace snug::detail
