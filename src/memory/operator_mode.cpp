#include "src/memory/operator_mode.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <vector>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/memory/operator_cap.h"
#include "src/memory/weight_window.h"

#if __has_include(<c10/core/impl/FakeTensorModeTLS.h>)
#include <c10/core/impl/FakeTensorModeTLS.h>
#define SNUG_LIBTORCH_HAS_FAKE_MODE 1
#endif

// How every operator comes to snug
//
// Problem: recomputation, plans and caps must see every operator with the tensors of the kernel, on any device and in
// an unchanged program. Views, about half of the operators of a step, matter to nobody.
// Options: a TorchDispatchMode needs Python; RecordFunction sees calls but cannot change a call; a kernel for each
// operator would miss operators of other libraries.
// Choice: a kernel for all operators (a fallback), on a dispatch key that no tensor has. If a thread's state includes
// the key, the dispatcher calls the fallback after autograd and before any device's kernel. The dispatcher skips the
// key for views: a boxed call of a view costs more than the view.
// Consequence: snug takes a key that LibTorch owns. Before LibTorch 2.13, DispatchKey::Fake was reserved for uses of
// this kind. LibTorch 2.13 means the key for a mode of LibTorch's own, which makes tensors without values, but
// registers nothing. A later LibTorch may register a kernel: snug's fallback then calls LibTorch's kernel. Tried on
// 2.11.0 and 2.13.0, with a kernel of a test in the place of the later LibTorch's.

namespace snug::detail {

// Two private members of the dispatcher. An explicit instantiation may name private members, and does not compile if
// LibTorch renames the members.
constexpr auto fallbacks_of_dispatcher();
constexpr auto deregister_of_dispatcher();
template <auto Member>
struct Fallbacks {
  friend constexpr auto fallbacks_of_dispatcher() { return Member; }
};
template <auto Member>
struct Deregister {
  friend constexpr auto deregister_of_dispatcher() { return Member; }
};
template struct Fallbacks<&c10::Dispatcher::backendFallbackKernels_>;
template struct Deregister<&c10::Dispatcher::deregisterFallback_>;

namespace {

constexpr auto kKey = c10::DispatchKey::Fake;
const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

c10::KernelFunction of_others;  // invalid if nobody had registered a kernel before snug

thread_local const OperatorScope* innermost = nullptr;  // innermost of the scopes that see the calls made now
thread_local int open_seams = 0;
thread_local bool key_was_included = false;  // before the first open seam
thread_local std::optional<OperatorSeam> seam_for_windows;

}  // namespace

struct OperatorDispatch {
  static void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const OperatorScope* scope,
                  RandomDraw& random, Stack& stack) {
    if (scope != nullptr) {
      const Replaced outside(innermost, scope->outside_);
      scope->policy_.call(OperatorCall(op, keys, scope->outside_, random), stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    const auto kernel = [&](const c10::OperatorHandle& one) {
      const OperandsInWindow operands(one, stack);
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

// Takes away the kernel that was registered for a key, and returns the kernel.
c10::KernelFunction taken_from(c10::Dispatcher& dispatcher, c10::DispatchKey key) {
  const auto index = static_cast<size_t>(c10::getDispatchTableIndexForDispatchKey(key));
  c10::KernelFunction kernel = (dispatcher.*fallbacks_of_dispatcher())[index].kernel;
  (dispatcher.*deregister_of_dispatcher())(key);
  return kernel;
}

bool is_for_others(const c10::OperatorHandle& op, const Stack& stack) {
  if (!of_others.isValid() || of_others.isFallthrough()) {
    return false;
  }
#ifdef SNUG_LIBTORCH_HAS_FAKE_MODE
  if (c10::impl::FakeTensorModeTLS::get_state() != nullptr) {
    return true;
  }
#endif
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    return argument.isTensor() && argument.toTensor().defined() && argument.toTensor().key_set().has(kKey);
  });
}

// Whether a compiler traces: the operators have no values. Since LibTorch 2.13 the compiler's modes take such operators
// before DispatchKey::Fake is asked. Before 2.13 the order is the other way round, and snug hands the operators on.
bool is_for_compiler(c10::DispatchKeySet keys) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Mode = c10::impl::TorchDispatchModeKey;
  return kBelow.has(c10::DispatchKey::Python) && keys.has(c10::DispatchKey::Python) &&
         (Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL));
}

// If an operator makes a tensor from nothing, the operator's keys do not include the backend yet: the backend follows
// from the device.
bool is_on_meta(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const Stack& stack) {
  if (!keys.has(c10::DispatchKey::BackendSelect)) {
    return keys.has_backend(c10::BackendComponent::MetaBit);
  }
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    return (argument.isDevice() && argument.toDevice().is_meta()) ||
           (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().is_meta());
  });
}

// Autograd hands the set of keys on to autograd's own threads. Autograd's threads have no scopes, but keep caps.
// Policies are not shown tensors on the meta device, which have no values: compilers trace with tensors on the meta
// device.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (seam_for_windows && !WeightWindow::exists()) {
    seam_for_windows.reset();
  }
  if (is_for_others(op, *stack)) {
    of_others.callBoxed(op, keys, stack);
    return;
  }
  if (is_for_compiler(keys)) {
    op.redispatchBoxed(keys & kBelow, stack);
    return;
  }
  RandomDraw random;
  const OperatorScope* scope = innermost != nullptr && is_on_meta(op, keys, *stack) ? nullptr : innermost;
  OperatorDispatch::run(op, keys, scope, random, *stack);
}

// Lets LibTorch's views skip the key. Other libraries may register their operators later, or again.
void pass_views_by(c10::Dispatcher& dispatcher) {
  static auto& registrations = *new std::vector<c10::RegistrationHandleRAII>;  // never destroyed, as the dispatcher
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) {
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (op && makes_only_views(op->schema()) && !op->hasKernelForDispatchKey(kKey)) {
      registrations.push_back(dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFallthrough(), std::nullopt,
                                                      /*inferred_function_schema=*/nullptr, "snug"));
    }
  }
}

void register_once() {
  static const auto registration = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    try {
      if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) {
        of_others = taken_from(dispatcher, kKey);
      }
      if (!of_others.isValid() || of_others.isFallthrough()) {
        pass_views_by(dispatcher);
      }
      return dispatcher.registerFallback(kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "snug");
    } catch (const std::exception& error) {
      throw ConfigError(
          fmt::format("operator mode: no kernel can be registered for DispatchKey::Fake ({})", error.what()));
    }
  }();
  (void)registration;
}

}  // namespace

bool makes_only_views(const c10::FunctionSchema& schema) {
  const auto writes = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto is_view = [&](const c10::Argument& result) { return result.alias_info() != nullptr && !writes(result); };
  const bool hides_it = schema.name() == "aten::_unsafe_view";  // each linear layer calls it
  return hides_it || (!schema.returns().empty() && std::ranges::none_of(schema.arguments(), writes) &&
                      std::ranges::all_of(schema.returns(), is_view));
}

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

void keep_seam_for_windows() {
  if (!seam_for_windows) {
    seam_for_windows.emplace();
  }
}

OperatorScope::OperatorScope(OperatorPolicy& policy) : policy_(policy), outside_(innermost) { innermost = this; }

OperatorScope::~OperatorScope() {
  innermost = outside_;
  tell_if_switched_off();
}

void OperatorScope::tell_if_switched_off() const {
  if (!c10::impl::tls_is_dispatch_key_included(kKey)) {
    policy_.was_switched_off();
  }
}

void report_unseen_write(const at::Tensor& tensor) {
  note_written_weight(tensor);
  for (const OperatorScope* scope = innermost; scope != nullptr; scope = scope->outside_) {
    scope->policy_.unseen_write(tensor);
  }
}

void report_coming_write(const at::Tensor& tensor) {
  for (const OperatorScope* scope = innermost; scope != nullptr; scope = scope->outside_) {
    scope->policy_.before_unseen_write(tensor);
  }
}

UnseenOperators::UnseenOperators() : innermost_(innermost, nullptr) {}

}  // namespace snug::detail
