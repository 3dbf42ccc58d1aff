#include <algorithm>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "snug/core.h"
#include "snug/snapshot.h"
#include "src/core/optimizer_capabilities.h"

namespace snug {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Asks for no pointer, because weights may be on the host or on other ranks.
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.numel() > 0 && a.has_storage() && b.has_storage() &&
                          a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
                          a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
                          a.strides() == b.strides() && a.scalar_type() == b.scalar_type());
}

// Parameters, then buffers, in the module's order; each tensor once.
NamedTensors named_tensors(const torch::nn::Module& module) {
  NamedTensors result;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      const bool known = std::any_of(result.begin(), result.end(),
                                     [&](const auto& other) { return same_memory(item.value(), other.second); });
      if (!known) {
        result.emplace_back(item.key(), item.value());
      }
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return result;
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

void check_fits(const NamedTensors& own, const StateDict& state) {
  constexpr const char* kCure = "was this state saved by a model with other options?";
  for (const auto& [name, tensor] : own) {
    if (!state.contains(name)) {
      throw CorruptFile(fmt::format("stateful(module).load: there is no '{}' in the state; {}", name, kCure));
    }
    const auto& saved = state.get<at::Tensor>(name);
    if (saved.sizes() != tensor.sizes() || saved.scalar_type() != tensor.scalar_type()) {
      throw CorruptFile(fmt::format("stateful(module).load: '{}' is {} in the state, but {} in the model; {}", name,
                                    describe(saved), describe(tensor), kCure));
    }
  }
  for (const StateDict::Entry& entry : state.entries()) {
    if (std::none_of(own.begin(), own.end(), [&](const auto& item) { return item.first == entry.name; })) {
      throw CorruptFile(
          fmt::format("stateful(module).load: the state has '{}', which the model lacks; {}", entry.name, kCure));
    }
  }
}

void load_module(const torch::nn::Module& module, const StateDict& state) {
  const NamedTensors own = named_tensors(module);
  check_fits(own, state);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    tensor.copy_(state.get<at::Tensor>(name));
  }
}

// The kind of optimizer, which torch's archive does not check by itself; nor does it check the parameters' sizes.
std::string kind_of(const torch::optim::Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

std::string parameters_of(const torch::optim::Optimizer& optimizer) {
  std::string text;
  for (const auto& group : optimizer.param_groups()) {
    text += text.empty() ? "" : "; ";
    for (const at::Tensor& parameter : group.params()) {
      text += fmt::format("[{}]", fmt::join(parameter.sizes(), ","));
    }
  }
  return text;
}

StateDict save_archive(const torch::optim::Optimizer& optimizer) {
  auto bytes = std::make_shared<std::vector<char>>();
  try {
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    archive.save_to([&](const void* data, size_t count) {
      const auto* begin = static_cast<const char*>(data);
      bytes->insert(bytes->end(), begin, begin + count);
      return count;
    });
  } catch (const c10::Error& error) {
    throw ConfigError(
        fmt::format("stateful(optimizer).state: torch cannot save the state of {}: {}; use another "
                    "optimizer, or leave it out of what is saved",
                    kind_of(optimizer), error.what_without_backtrace()));
  }
  const auto size = static_cast<int64_t>(bytes->size());
  StateDict state;
  state.set("kind", kind_of(optimizer));
  state.set("parameters", parameters_of(optimizer));
  state.set("archive", at::from_blob(bytes->data(), {size}, [bytes](void*) {}, at::kByte));
  return state;
}

void load_archive(torch::optim::Optimizer& optimizer, const StateDict& state) {
  const auto expect = [&](const char* entry, const std::string& own) {
    if (const auto& saved = state.get<std::string>(entry); saved != own) {
      throw CorruptFile(
          fmt::format("stateful(optimizer).load: {} of the saved optimizer: {:.200}; of this one: {:.200}; "
                      "make both with the same model and optimizer",
                      entry, saved, own));
    }
  };
  expect("kind", kind_of(optimizer));
  expect("parameters", parameters_of(optimizer));
  const at::Tensor bytes = state.get<at::Tensor>("archive").cpu().contiguous();
  // torch adds to the existing state: entries that the archive lacks would stay.
  auto before = std::exchange(optimizer.state(), {});
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
    optimizer.load(archive);
  } catch (const c10::Error& error) {
    optimizer.state() = std::move(before);
    throw CorruptFile(
        fmt::format("stateful(optimizer).load: torch cannot read its archive: {}", error.what_without_backtrace()));
  }
}

}  // namespace

Stateful stateful(torch::nn::Module& module) {
  return {[&module] {
            StateDict state;
            for (const auto& [name, tensor] : named_tensors(module)) {
              state.set(name, tensor.detach());
            }
            return state;
          },
          [&module](const StateDict& state) { load_module(module, state); }};
}

Stateful stateful(torch::optim::Optimizer& optimizer) {
  if (StatefulOptimizer* own = detail::capabilities_of(optimizer).state) {
    return {[own] { return own->state_dict(); }, [own](const StateDict& state) { own->load_state_dict(state); }};
  }
  return {[&optimizer] { return save_archive(optimizer); },
          [&optimizer](const StateDict& state) { load_archive(optimizer, state); }};
}

}  // namespace snug
