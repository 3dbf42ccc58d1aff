// Gaps of a device's allocator: how far reserved bytes lie above the bytes of tensors, in a step under plans.
// Simulated: the step runs on the CPU, and its allocations are laid out as three allocators would lay them out. Prints
// a table for each model.
//
// usage: gaps [MODEL ...]     resnet, gpt-tiny, gpt-small, gpt-medium or gpt-base, of 2 sequences
//
// - segments: CUDA's caching allocator of LibTorch (c10/cuda/CUDACachingAllocator.cpp). Tensors of at most 1 MiB lie in
//   segments of 2 MiB, larger tensors in segments of 20 MiB, or of their own from 10 MiB on. The smallest free block
//   that suffices is split.
// - growing: the same with expandable_segments: one segment for small tensors and one for large tensors, which grow by
//   2 and by 20 MiB.
// - planned: each tensor has an offset, chosen with all lifetimes known: the largest tensor first, at the lowest offset
//   that is free in its whole life ("greedy by size", Pisarchyk & Lee 2020, arXiv:2001.03288).
//
// The parameters are allocated first. Two equal steps follow: plain, and then under plans. Gradients end with each
// step.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/core.h"
#include "src/memory/device_memory.h"
#include "src/planner/curve.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

namespace measure = snug::measure;
using torch::Tensor;

constexpr int64_t kMiB = 1 << 20, kBlock = 512;

int64_t rounded_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// The life of a tensor: from one event of a trace to another.
struct Life {
  int64_t bytes;
  int64_t begin, end;
};

/// What is allocated while it lives, and the parameters before.
class Trace final : public snug::detail::MemoryObserver {
 public:
  explicit Trace(const std::vector<Tensor>& parameters) : observation_(*this, c10::kCPU) {
    for (const Tensor& parameter : parameters) {
      lives_.push_back({rounded_up(static_cast<int64_t>(parameter.nbytes()), kBlock), now_++, -1});
    }
  }

  /// All lives, in the order of their beginnings.
  std::vector<Life> lives() const {
    std::vector<Life> lives = lives_;
    for (Life& life : lives) {
      life.end = life.end < 0 ? now_ : life.end;
    }
    return lives;
  }

 private:
  void on_allocate(c10::Device, const void* data, int64_t bytes) noexcept override {
    alive_[data] = lives_.size();
    lives_.push_back({rounded_up(bytes, kBlock), now_++, -1});
  }
  void on_free(c10::Device, const void* data, int64_t) noexcept override {
    if (const auto found = alive_.find(data); found != alive_.end()) {
      lives_[found->second].end = now_++;
      alive_.erase(found);
    }
  }
  void on_saved_for_backward(const void*) noexcept override {}

  std::vector<Life> lives_;
  std::unordered_map<const void*, size_t> alive_;
  int64_t now_ = 0;
  snug::detail::MemoryObservation observation_;
};

/// Calls begin(i) and end(i) for the lives, in the order of the events.
void replay(const std::vector<Life>& lives, const std::function<void(size_t)>& begin,
            const std::function<void(size_t)>& end) {
  std::map<int64_t, std::pair<size_t, bool>> events;
  for (size_t i = 0; i < lives.size(); ++i) {
    events[lives[i].begin] = {i, true};
    events.insert({lives[i].end, {i, false}});  // lives that never end share the last event, which no layout needs
  }
  for (const auto& [time, event] : events) {
    (event.second ? begin : end)(event.first);
  }
}

int64_t peak_of(const std::vector<Life>& lives) {
  int64_t level = 0, peak = 0;
  replay(
      lives, [&](size_t i) { peak = std::max(peak, level += lives[i].bytes); },
      [&](size_t i) { level -= lives[i].bytes; });
  return peak;
}

/// One of the two pools of CUDA's allocator.
class Pool {
 public:
  Pool(bool is_small, bool grows) : is_small_(is_small), grows_(grows) {}

  struct Place {
    int64_t address, bytes;
  };
  Place allocate(int64_t bytes) {
    auto found = by_size_.lower_bound({bytes, 0});
    if (found == by_size_.end()) {
      grows_ ? grow(bytes) : add_segment(bytes);
      found = by_size_.lower_bound({bytes, 0});
    }
    const auto [size, address] = *found;
    take({address, size});
    const int64_t rest = size - bytes;
    const bool is_split = is_small_ ? rest >= kBlock : rest > kMiB;
    if (is_split) {
      put({address + bytes, rest});
    }
    return {address, is_split ? bytes : size};
  }
  void release(Place place) {
    if (const auto next = by_address_.find(place.address + place.bytes); next != by_address_.end()) {
      place.bytes += next->second;
      take({next->first, next->second});
    }
    if (auto before = by_address_.lower_bound(place.address); before != by_address_.begin()) {
      --before;
      if (const Place first{before->first, before->second}; first.address + first.bytes == place.address) {
        take(first);
        place = {first.address, first.bytes + place.bytes};
      }
    }
    put(place);
  }
  int64_t reserved() const { return reserved_; }

 private:
  void take(Place place) {
    by_address_.erase(place.address);
    by_size_.erase({place.bytes, place.address});
  }
  void put(Place place) {
    by_address_[place.address] = place.bytes;
    by_size_.insert({place.bytes, place.address});
  }
  void add_segment(int64_t bytes) {
    const int64_t own = bytes < 10 * kMiB ? 20 * kMiB : rounded_up(bytes, 2 * kMiB);
    const int64_t size = is_small_ ? 2 * kMiB : own;
    put({end_ + kBlock, size});  // the hole keeps segments apart
    end_ += kBlock + size;
    reserved_ += size;
  }
  void grow(int64_t bytes) {
    const auto last = by_address_.empty() ? by_address_.end() : std::prev(by_address_.end());
    const bool is_at_end = last != by_address_.end() && last->first + last->second == end_;
    const int64_t more = rounded_up(bytes - (is_at_end ? last->second : 0), is_small_ ? 2 * kMiB : 20 * kMiB);
    release({end_, more});
    end_ += more;
    reserved_ += more;
  }

  bool is_small_, grows_;
  std::map<int64_t, int64_t> by_address_;          // free blocks
  std::set<std::pair<int64_t, int64_t>> by_size_;  // the same
  int64_t end_ = 0, reserved_ = 0;
};

/// Nothing is given back, so the bytes reserved at last are the most.
int64_t reserved_by_cuda(const std::vector<Life>& lives, bool grows) {
  Pool small(true, grows), large(false, grows);
  std::vector<Pool::Place> places(lives.size());
  const auto pool = [&](size_t i) -> Pool& { return lives[i].bytes <= kMiB ? small : large; };
  replay(
      lives, [&](size_t i) { places[i] = pool(i).allocate(lives[i].bytes); },
      [&](size_t i) { pool(i).release(places[i]); });
  return small.reserved() + large.reserved();
}

int64_t reserved_by_plan(const std::vector<Life>& lives) {
  std::vector<size_t> order(lives.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::ranges::stable_sort(order, std::ranges::greater(), [&](size_t i) { return lives[i].bytes; });
  std::map<std::pair<int64_t, size_t>, Life> placed;  // by offset
  int64_t reserved = 0;
  for (const size_t i : order) {
    int64_t offset = 0;
    for (const auto& [at, other] : placed) {
      if (other.begin < lives[i].end && lives[i].begin < other.end) {
        if (offset + lives[i].bytes <= at.first) {
          break;
        }
        offset = std::max(offset, at.first + other.bytes);
      }
    }
    placed[{offset, i}] = lives[i];
    reserved = std::max(reserved, offset + lives[i].bytes);
  }
  return reserved;
}

void print_row(const measure::DeepModel& model, const std::string& what, const std::function<Tensor()>& forward) {
  const std::vector<Tensor> parameters = model.parameters();
  const Trace trace(parameters);
  for (int step = 0; step < 2; ++step) {
    forward().backward();
    measure::drop_gradients(parameters);
  }
  const std::vector<Life> lives = trace.lives();
  const int64_t peak = peak_of(lives);
  const auto gaps = [&](int64_t reserved) {
    return fmt::format("{:.0f} ({:.1f} %)", static_cast<double>(reserved - peak) / kMiB,
                       100.0 * static_cast<double>(reserved - peak) / static_cast<double>(peak));
  };
  std::cout << fmt::format("| {} | {:.0f} | {} | {} | {} |\n", what, static_cast<double>(peak) / kMiB,
                           gaps(reserved_by_cuda(lives, false)), gaps(reserved_by_cuda(lives, true)),
                           gaps(reserved_by_plan(lives)))
            << std::flush;
}

void print_rows(const measure::DeepModel& model) {
  const Tensor input = model.input(model.batch);
  const auto plain = [&] {
    return model.loss(input, [&](Tensor x) { return measure::in_order(model.layers, std::move(x)); });
  };
  std::cout << "\n## " << model.what << "\n\n| step | tensors, MiB | gaps, MiB: segments | growing | planned |\n"
            << "|---|---|---|---|---|\n";
  print_row(model, "plain", plain);
  const snug::plan::Simulator simulator(snug::detail::profile_step(plain));
  for (const auto& point : snug::plan::curve(simulator, {.points = 4}).points) {
    if (point.peak_bytes < point.plain_peak_bytes) {
      const auto plan = snug::detail::PlanContent::make_plan(simulator, point);
      print_row(model, fmt::format("in {} %", 100 * point.peak_bytes / point.plain_peak_bytes),
                measure::under_plan(plain, plan));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    std::vector<std::string> names(argv + 1, argv + argc);
    if (names.empty()) {
      names = {"gpt-small", "resnet"};
    }
    for (const std::string& name : names) {
      constexpr int64_t kDepth = 32, kImages = 64, kSequences = 2;
      print_rows(name == "resnet" ? measure::deep_resnet(kDepth, kImages)
                                  : measure::deep_gpt(snug::gpt_configuration(name), kSequences));
    }
    return 0;
  } catch (const snug::ConfigError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
