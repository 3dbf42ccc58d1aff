#pragma once
// The interface below autograd, beside the interface for saved tensors. A policy sees every operator that runs on a
// thread and makes or changes values, in forward and in backward, with the operands, before the kernel sees the
// operands. A policy can change operands, replace the call by the policy's own results, or just count.
//
//   class Count final : public OperatorPolicy {
//     void call(const OperatorCall& call, Stack& stack) override { ++count; call.proceed(stack); }
//   };
//   const OperatorScope scope(count);

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "src/core/replaced.h"
#include "src/memory/backward_pass.h"
#include "src/memory/random_draw.h"

namespace snug::detail {

using Stack = torch::jit::Stack;

class OperatorScope;

/// Calls f(Tensor&) for each defined tensor in `value`: a tensor, a list of tensors, or a value without tensors.
template <class F>
void visit_tensors_in(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      f(value.toTensor());
    }
  } else if (value.isList()) {  // of tensors, of optional tensors, or of numbers
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) {
        f(element.toTensor());
      }
    }
  }
}

/// The circumstances of an operator's call: the layers above the call, and the modes.
struct CallContext {
  c10::DispatchKeySet keys;
  c10::impl::LocalDispatchKeySet local;
  bool grad_mode;  // some kernels look at the mode
};

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& callee, c10::DispatchKeySet keys, const OperatorScope* outside,
               RandomDraw& drawn)
      : op(callee), random(drawn), keys_(keys), outside_(outside) {}

  /// Takes the arguments from the end of `stack` and leaves the results at the end of `stack`. The next outer policy
  /// makes the call, or the kernel if no outer policy exists. May be called any number of times, or not at all.
  void proceed(Stack& stack) const;

  CallContext context() const;

  const c10::OperatorHandle& op;
  RandomDraw& random;  ///< shared by all policies

 private:
  c10::DispatchKeySet keys_;
  const OperatorScope* outside_;
};

/// Called only on the thread that made the scope. Operators are seen below autograd, autocast and in-place bookkeeping.
/// Composite operators are seen as their parts. Not seen are:
/// - operators that a kernel calls;
/// - LibTorch's operators whose results are views, unless another library had a kernel on the seam's key first;
/// - operators on the meta device;
/// - operators of a mode that makes tensors without values.
///
/// Operators that a policy calls go to the policies outside of the calling policy.
class OperatorPolicy {
 public:
  virtual ~OperatorPolicy() = default;
  /// The last op.schema().arguments().size() elements of `stack` are the arguments. `call` must replace the arguments
  /// by the results.
  virtual void call(const OperatorCall& call, Stack& stack) = 0;
  /// Code outside operators has written to the tensor; see report_unseen_write.
  virtual void unseen_write(const at::Tensor&) {}
  /// Code outside operators is about to write to the tensor; see report_coming_write. May throw.
  virtual void before_unseen_write(const at::Tensor&) {}
  /// Called at the end of a scope, or by tell_if_switched_off(): somebody switched the dispatch key off within the
  /// scope, so operators went unseen. Must not throw.
  virtual void was_switched_off() {}
};

/// Brings operators of this thread, and of backward passes that begin on this thread, to the seam until the end of the
/// scope, even if no policy asks for operators: the seam keeps the caps of operator_cap.h. Several seams may end in any
/// order, on the thread that made the seams.
class [[nodiscard]] OperatorSeam final {
 public:
  OperatorSeam();
  ~OperatorSeam();
  OperatorSeam(const OperatorSeam&) = delete;
  OperatorSeam& operator=(const OperatorSeam&) = delete;
};

/// Opens a seam on this thread that stays open until the thread calls an operator without a WeightWindow in the
/// process: the program's own operators find weights that are not in memory.
void keep_seam_for_windows();

/// Makes `policy` the first policy to be asked on this thread, until the end of the scope. `policy` must outlive the
/// scope. An operator costs about a microsecond more, and nothing without a scope. Scopes must end in the reverse of
/// the order in which the scopes began. Backward passes that begin during the scope stay on this thread and are seen.
/// To see operators of another thread, make a scope on the other thread (in a hook, or in the unpacking of a saved
/// tensor).
class [[nodiscard]] OperatorScope final {
 public:
  explicit OperatorScope(OperatorPolicy& policy);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  /// Calls policy.was_switched_off() now, if the key was switched off. Otherwise the call comes at the end of the
  /// scope.
  void tell_if_switched_off() const;

 private:
  friend struct OperatorDispatch;
  friend void report_unseen_write(const at::Tensor& tensor);
  friend void report_coming_write(const at::Tensor& tensor);
  OperatorPolicy& policy_;
  const OperatorScope* outside_;
  OperatorSeam seam_;
  BackwardOnThisThread backward_;
};

/// Whether all results of an operator are views of arguments, and the operator writes nothing. True for _unsafe_view
/// too, whose schema does not tell.
bool makes_only_views(const c10::FunctionSchema& schema);

/// Repeats a seen call: the same kernel, below autograd and autocast, out of sight of all policies. `from` is the
/// generator from which a random operator drew.
void call_again(const c10::OperatorHandle& op, const CallContext& context, Stack& stack, const at::Generator& from);

/// Tells this thread's policies about a tensor with new values from elsewhere, for example from another process.
void report_unseen_write(const at::Tensor& tensor);
/// Tells this thread's policies about a tensor that will get values from elsewhere.
void report_coming_write(const at::Tensor& tensor);

/// Hides the operators that this thread calls from all policies, until the end of the scope. Meant for the side work of
/// hooks.
class [[nodiscard]] UnseenOperators final {
 public:
  UnseenOperators();

 private:
  Replaced<const OperatorScope*> innermost_;
};

}  // namespace snug::detail
