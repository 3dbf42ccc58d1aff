#pragma once
// The interface below autograd, beside the one for saved tensors: a policy that sees every operator that runs on a
// thread, forward and backward, with its operands, before the kernel does. It can change operands, replace the call by
// results of its own, or just count.
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

/// The layers below which, and the modes with which, an operator was called.
struct CallContext {
  c10::DispatchKeySet keys;
  c10::impl::LocalDispatchKeySet local;
  bool grad_mode;  // which some kernels look at
};

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& callee, c10::DispatchKeySet keys, const OperatorScope* outside,
               RandomDraw& drawn)
      : op(callee), random(drawn), keys_(keys), outside_(outside) {}

  /// Takes the arguments from the end of `stack` and leaves the results there. The next outer policy makes the call, or
  /// the kernel if there is none. May be called any number of times, or not at all.
  void proceed(Stack& stack) const;

  CallContext context() const;

  const c10::OperatorHandle& op;
  RandomDraw& random;  ///< all policies share it

 private:
  c10::DispatchKeySet keys_;
  const OperatorScope* outside_;
};

/// Called only on the thread that made the scope. Operators are seen below autograd, autocast and in-place bookkeeping.
/// Composite operators are seen as their parts. Not seen are operators that a kernel calls, those on the meta device,
/// and those of a mode that makes tensors without values. Operators that a policy calls go to the policies outside of
/// it.
class OperatorPolicy {
 public:
  virtual ~OperatorPolicy() = default;
  /// The last op.schema().arguments().size() elements of `stack` are the arguments. `call` must replace them by the
  /// results.
  virtual void call(const OperatorCall& call, Stack& stack) = 0;
  /// Code that is no operator has written to the tensor; see report_unseen_write.
  virtual void unseen_write(const at::Tensor&) {}
  /// Such code is about to write; see report_coming_write. May throw.
  virtual void before_unseen_write(const at::Tensor&) {}
  /// At the end of a scope, or when it is asked: somebody switched the dispatch key off within it, so operators went
  /// unseen. Must not throw.
  virtual void was_switched_off() {}
};

/// While it lives, operators of this thread, and of backward passes that begin on it, come to this seam though no
/// policy asks for them: it keeps the caps of operator_cap.h. Several may end in any order, on the thread that made
/// them.
class [[nodiscard]] OperatorSeam final {
 public:
  OperatorSeam();
  ~OperatorSeam();
  OperatorSeam(const OperatorSeam&) = delete;
  OperatorSeam& operator=(const OperatorSeam&) = delete;
};

/// While it lives, `policy` is the first to be asked on this thread. `policy` must outlive the scope. An operator costs
/// about a microsecond more, and nothing when there is no scope. Scopes must end in the reverse of the order in which
/// they began. Backward passes that begin while the scope lives stay on this thread and are seen. To see operators of
/// other threads, make a scope there (in a hook, or where a saved tensor is unpacked).
class [[nodiscard]] OperatorScope final {
 public:
  explicit OperatorScope(OperatorPolicy& policy);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  /// Asks now for policy.was_switched_off(), which comes at the end of the scope otherwise.
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

/// Repeats a call that was seen: the same kernel, below autograd and autocast, out of sight of all policies. `from` is
/// the generator that a random operator drew from.
void call_again(const c10::OperatorHandle& op, const CallContext& context, Stack& stack, const at::Generator& from);

/// Tells the policies of this thread that a tensor got values from elsewhere, for example from another process.
void report_unseen_write(const at::Tensor& tensor);
/// Tells them that it will get such values.
void report_coming_write(const at::Tensor& tensor);

/// While it lives, no policy sees the operators that this thread calls. For the side work of hooks.
class [[nodiscard]] UnseenOperators final {
 public:
  UnseenOperators();

 private:
  Replaced<const OperatorScope*> innermost_;
};

}  // namespace snug::detail
