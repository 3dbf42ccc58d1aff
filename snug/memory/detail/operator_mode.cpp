#include "snug/memory/detail/operator_mode.h"

#include <exception>
#include <utility>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/memory/detail/operator_cap.h"

// A kernel for all operators, on a dispatch key that no tensor has. Where this thread's state includes the key, the
// dispatcher calls the kernel after autograd and before any device's kernel. Before LibTorch 2.13, DispatchKey::Fake
// was reserved for such use. LibTorch 2.13 means it for a mode of its own, but registers nothing. Tried on 2.11.0 and
// 2.13.0.

namespace snug::detail {
namespace {

constexpr auto kKey = c10::DispatchKey::Fake;
const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

thread_local const OperatorScope* innermost = nullptr;  // of the scopes that see what is called now
thread_local int open_seams = 0;
thread_local bool key_was_included = false;  // before the first of them

class InnermostIs {
 public:
  explicit InnermostIs(const OperatorScope* scope) : before_(std::exchange(innermost, scope)) {}
  ~InnermostIs() { innermost = before_; }
  InnermostIs(const InnermostIs&) = delete;
  InnermostIs& operator=(const InnermostIs&) = delete;

 private:
  const OperatorScope* before_;
};

}  // namespace

struct OperatorDispatch {
  static void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const OperatorScope* scope,
                  RandomDraw& random, Stack& stack) {
    if (scope != nullptr) {
      const InnermostIs outside(scope->outside_);
      scope->policy_.call(OperatorCall(op, keys, scope->outside_, random), stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    const auto kernel = [&](const c10::OperatorHandle& one) {
      const OperatorCapCheck cap;
      one.redispatchBoxed(keys & kBelow, &stack);
      cap.check();
    };
    if (random.is_noted || random.from.defined()) {
      random.run(op, stack, kernel);
    } else {
      kernel(op);
    }
  }
};

namespace {

// Autograd hands the set of keys on to its own threads. Those have no scopes, but keep caps.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  RandomDraw random;
  OperatorDispatch::run(op, keys, innermost, random, *stack);
}

void register_once() {
  static const auto registration = [] {
    try {
      return c10::Dispatcher::singleton().registerFallback(
          kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "snug");
    } catch (const std::exception& error) {
      throw ConfigError(
          fmt::format("operator mode: another library has registered itself for DispatchKey::Fake, which checkpointing "
                      "uses to see operators ({}); the two cannot share a process",
                      error.what()));
    }
  }();
  (void)registration;
}

}  // namespace

void OperatorCall::proceed(Stack& stack) const { OperatorDispatch::run(op, keys_, outside_, random, stack); }

CallContext OperatorCall::context() const {
  return {keys_, c10::impl::tls_local_dispatch_key_set(), c10::GradMode::is_enabled()};
}

void call_again(const c10::OperatorHandle& op, const CallContext& context, Stack& stack, const at::Generator& from) {
  const UnseenOperators unseen;
  const c10::impl::ForceDispatchKeyGuard local(context.local);
  const c10::AutoGradMode grad_mode(context.grad_mode);
  RandomDraw random{.from = from};
  OperatorDispatch::run(op, context.keys, /*scope=*/nullptr, random, stack);
}

OperatorSeam::OperatorSeam() {
  register_once();
  if (open_seams++ == 0) {
    key_was_included = c10::impl::tls_is_dispatch_key_included(kKey);
  }
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

OperatorSeam::~OperatorSeam() {
  if (--open_seams == 0) {
    c10::impl::tls_set_dispatch_key_included(kKey, key_was_included);
  }
}

OperatorScope::OperatorScope(OperatorPolicy& policy) : policy_(policy), outside_(innermost) { innermost = this; }

OperatorScope::~OperatorScope() { innermost = outside_; }

void report_unseen_write(const at::Tensor& tensor) {
  for (const OperatorScope* scope = innermost; scope != nullptr; scope = scope->outside_) {
    scope->policy_.unseen_write(tensor);
  }
}

UnseenOperators::UnseenOperators() : before_(std::exchange(innermost, nullptr)) {}

UnseenOperators::~UnseenOperators() { innermost = before_; }

}  // namespace snug::detail
