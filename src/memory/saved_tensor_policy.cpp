#include "src/memory/saved_tensor_policy.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include "src/core/has_bytes.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/forwarding_engine.h"
#include "src/memory/not_adopted.h"
#include "src/memory/operator_mode.h"

// How snug decides about saved tensors without a change to the model
//
// Problem: checkpointing, offload and accounting must see every tensor that autograd saves. LibTorch offers three
// places:
//
//   node by node    SavedVariable::register_hooks needs access to each node of the graph
//   Python's stack  at::SavedTensorDefaultHooks takes Python objects; only Python's engine reads the stack
//   the engine      SavedVariable asks the default engine for hooks each time a tensor is saved
//
// Choice: the engine. The method that answers, get_default_saved_variable_hooks(), is virtual, and Python's engine
// overrides the method to consult Python's stack of hooks. SnugEngine consults the thread's stack of policies below,
// and then the engine that SnugEngine found. The innermost policy or hook is in charge: Python's hooks win if Python's
// hooks began later.
//
// Consequence: with hooks, autograd leaves out the check that a saved tensor was not written after the save.
// PolicyHooks makes the check instead. PolicyHooks shares the tensor's version counter, and the version counter does
// not keep the tensor's memory alive. Tried on torch 2.11.0 and 2.13.0.

namespace snug::detail {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

struct InnermostPolicy {
  std::shared_ptr<SavedTensorPolicy> policy;
  size_t python_hooks;  // number of Python's hooks when the policy began: later hooks are inside the policy
};
thread_local std::vector<InnermostPolicy> policies;

class PolicyHooks final : public SavedVariableHooks {
 public:
  explicit PolicyHooks(std::shared_ptr<SavedTensorPolicy> policy) : policy_(std::move(policy)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    version_counter_ = torch::autograd::impl::version_counter(tensor);
    saved_version_ = version_counter_.current_version();
    const UnseenOperators unseen;  // the work of keeping a tensor is not a part of the computation
    packed_ = policy_->pack(tensor);
    const auto* kept = saved_tensors_are_observed() ? std::any_cast<at::Tensor>(&packed_) : nullptr;
    if (kept != nullptr) {
      mark_as_saved(*kept);
    }
  }

  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(version_counter_.current_version() == saved_version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is "
                "at version ",
                version_counter_.current_version(), "; expected version ", saved_version_,
                " instead. Clone it before the write, or write out of place.");
    return not_adopted(policy_->unpack(packed_), *policy_, packed_);
  }

 private:
  std::shared_ptr<SavedTensorPolicy> policy_;
  c10::VariableVersion version_counter_;
  uint32_t saved_version_ = 0;
  std::any packed_;
};

// Autograd's own behaviour, as a policy, so that the memory meter hears of saved tensors.
class Keep final : public SavedTensorPolicy {
 public:
  std::any pack(const at::Tensor& tensor) override { return tensor.detach(); }
  at::Tensor unpack(std::any& packed) override { return std::any_cast<at::Tensor&>(packed); }
};

// The innermost policy of the calling thread. Returns nullptr if the thread has no policy, if hooks of Python began
// inside the policy, or if Python allows no hooks.
std::shared_ptr<SavedTensorPolicy> policy_in_charge() {
  const InnermostPolicy* const last = policies.empty() ? nullptr : &policies.back();
  if (last == nullptr) {
    return nullptr;
  }
  const auto& python = at::SavedTensorDefaultHooks::get_tls_state();
  const bool is_innermost = python.stack.size() <= last->python_hooks;
  return is_innermost && !python.is_tracing && !python.disabled_error_message ? last->policy : nullptr;
}

class SnugEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (auto policy = policy_in_charge()) {
      return std::make_unique<PolicyHooks>(std::move(policy));
    }
    auto hooks = ForwardingEngine::get_default_saved_variable_hooks();
    if (hooks == nullptr && saved_tensors_are_observed()) {
      static const auto keep = std::make_shared<Keep>();
      hooks = std::make_unique<PolicyHooks>(keep);
    }
    return hooks;
  }
};

std::atomic<Engine*> in_front = nullptr;  // the engine made last
Engine& engine_in_front() { return *in_front; }

}  // namespace

void mark_as_saved(const at::Tensor& tensor) {
  if (saved_tensors_are_observed() && has_bytes(tensor)) {
    report_saved_for_backward(memory_of(tensor.storage()).get());
  }
}

void install_engine() {
  if (&Engine::get_default_engine() == in_front) {
    return;
  }
  static std::mutex mutex;
  static auto& made = *new std::vector<SnugEngine*>;  // never destroyed; an entry for each engine found
  const std::lock_guard lock(mutex);
  Engine& found = Engine::get_default_engine();
  if (&found == in_front) {
    return;
  }
  auto mine = std::find_if(made.begin(), made.end(), [&](const SnugEngine* one) { return &one->inner() == &found; });
  if (mine == made.end()) {
    mine = made.insert(made.end(), new SnugEngine(found));
  }
  in_front = *mine;
  torch::autograd::set_default_engine_stub(&engine_in_front);
}

PolicyScope::PolicyScope(std::shared_ptr<SavedTensorPolicy> policy) {
  install_engine();
  policies.push_back({std::move(policy), at::SavedTensorDefaultHooks::get_tls_state().stack.size()});
}

PolicyScope::~PolicyScope() { policies.pop_back(); }

std::shared_ptr<SavedTensorPolicy> current_policy() { return policies.empty() ? nullptr : policies.back().policy; }

}  // namespace snug::detail
