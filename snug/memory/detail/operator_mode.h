#pragma once
// The seam below autograd, beside that of saved tensors: a policy that sees every operator which runs on a thread, forward and backward, with
// its operands, before the kernel does. It can change operands, put results in place of the call, or just count.
//
//   class Count final : public OperatorPolicy {
//     void call(const OperatorCall& call, Stack& stack) override { ++count; call.proceed(stack); }
//   };
//   const OperatorScope scope(count);

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "snug/memory/detail/backward_pass.h"
#include "snug/memory/detail/random_draw.h"

namespace snug::detail {

using Stack = torch::jit::Stack;

class OperatorScope;

/// Below which layers, and with which modes, an operator was called.
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

  /// Takes the arguments from the end of `stack` and leaves the results: through the policy outside of this one if there is one,
  /// else by the kernel. May be called any number of times, or not at all.
  void proceed(Stack& stack) const;

  CallContext context() const;

  const c10::OperatorHandle& op;
  RandomDraw& random;  ///< all policies share it

 private:
  c10::DispatchKeySet keys_;
  const OperatorScope* outside_;
};

/// Called on the thread that made the scope only. Operators are seen below autograd, autocast and in-place bookkeeping: composite ones in
/// their parts, and none of those that a kernel calls. What a policy itself calls goes to the policies outside of it.
class OperatorPolicy {
 public:
  virtual ~OperatorPolicy() = default;
  /// The last op.schema().arguments().size() elements of `stack` are the arguments; the results are to take their place.
  virtual void call(const OperatorCall& call, Stack& stack) = 0;
  /// Something that is no operator has written to the tensor; see report_unseen_write.
  virtual void unseen_write(const at::Tensor&) {}
};

/// Asks `policy`, which must outlive it, first, while it lives, on this thread. Costs about a microsecond an operator, and nothing when
/// there is no scope. Scopes end in the reverse of the order in which they began. Backward passes that begin while it lives are seen: they stay on
/// this thread. For operators of others, make a scope there (in a hook, or where a saved tensor is unpacked).
/// Throws ConfigError if another library has registered itself for DispatchKey::Fake, which this uses.
class [[nodiscard]] OperatorScope final {
 public:
  explicit OperatorScope(OperatorPolicy& policy);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

 private:
  friend struct OperatorDispatch;
  friend void report_unseen_write(const at::Tensor& tensor);
  OperatorPolicy& policy_;
  const OperatorScope* outside_;
  bool key_was_included_;
  BackwardOnThisThread backward_;
};

/// Calls an operator as a call that was seen was: the same kernel, below autograd and autocast, out of sight of all policies. `from`: what
/// it drew from, if it was random.
void call_again(const c10::OperatorHandle& op, const CallContext& context, Stack& stack, const at::Generator& from);

/// Tells the policies of this thread that values came into a tensor from elsewhere, as from another process.
void report_unseen_write(const at::Tensor& tensor);

/// While it lives, no policy sees what this thread calls: for what hooks do on the side.
class [[nodiscard]] UnseenOperators final {
 public:
  UnseenOperators();
  ~UnseenOperators();
  UnseenOperators(const UnseenOperators&) = delete;
  UnseenOperators& operator=(const UnseenOperators&) = delete;

 private:
  const OperatorScope* before_;
};

}  // namespace snug::detail
