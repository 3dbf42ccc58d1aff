#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <variant>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/snapshot.h"
#include "snug/state.h"
#include "src/core/writers.h"

namespace snug {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

StateDict copy_of(const StateDict& state) {
  StateDict copy;
  for (const StateDict::Entry& entry : state.entries()) {
    if (const auto* tensor = std::get_if<at::Tensor>(&entry.value)) {
      const bool is_there = tensor->defined();
      copy.set(entry.name, is_there ? tensor->detach().to(at::kCPU, tensor->scalar_type(), /*non_blocking=*/false,
                                                          /*copy=*/true)
                                    : *tensor);
    } else if (const auto* nested = std::get_if<StateDict>(&entry.value)) {
      copy.set(entry.name, copy_of(*nested));
    } else {
      copy.set(entry.name, entry.value);
    }
  }
  return copy;
}

using Parts = std::map<std::string, Stateful>;

// Null: there is no memory for it.
std::unique_ptr<const Parts> copies_of(const Parts& parts) {
  const at::NoGradGuard no_grad;
  try {
    auto copies = std::make_unique<Parts>();
    for (const auto& [name, part] : parts) {
      (*copies)[name].state = [state = copy_of(part.state())] { return state; };
    }
    return copies;
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) {
      throw;
    }
    return nullptr;
  }
}

}  // namespace

std::string AsyncSnapshots::Report::str() const {
  return fmt::format("{} snapshots took {:.2f} s of training, and {:.2f} s beside it{}", saved, training_seconds,
                     background_seconds,
                     at_once > 0 ? fmt::format("; for {} there was no memory to copy the state", at_once) : "");
}

AsyncSnapshots::AsyncSnapshots(SnapshotStore& store) : store_(store) {}

AsyncSnapshots::~AsyncSnapshots() {
  if (under_way_.valid()) {
    under_way_.wait();
  }
}

void AsyncSnapshots::save(int64_t step, const std::map<std::string, Stateful>& parts) {
  if (detail::Writers::are_several()) {
    throw ConfigError(
        "AsyncSnapshots.save: ranks that save together meet in the save, and a thread beside training must not send; "
        "call SnapshotStore::save");
  }
  const auto begin = Clock::now();
  finish();
  if (auto copies = copies_of(parts)) {
    // The future keeps this function until somebody waits; the copies go when they are written.
    under_way_ = std::async(std::launch::async, [this, step, copies = std::move(copies)]() mutable {
      const auto thread_begin = Clock::now();
      const auto own = std::move(copies);
      store_.save(step, *own);
      return seconds_since(thread_begin);
    });
  } else {
    store_.save(step, parts);
    ++report_.saved;
    ++report_.at_once;
  }
  report_.training_seconds += seconds_since(begin);
}

void AsyncSnapshots::wait() {
  const auto begin = Clock::now();
  finish();
  report_.training_seconds += seconds_since(begin);
}

void AsyncSnapshots::finish() {
  if (under_way_.valid()) {
    report_.background_seconds += under_way_.get();
    ++report_.saved;
  }
}

}  // namespace snug
