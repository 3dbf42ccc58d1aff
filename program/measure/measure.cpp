#include "program/measure/measure.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>

#include "program/chart/median.h"
#include "snug/core.h"
#include "snug/memory.h"

namespace snug::measure {

void wait_for(c10::Device device) {
  if (!device.is_cpu()) {
    at::accelerator::synchronizeDevice(device.has_index() ? device.index() : at::accelerator::getDeviceIndex());
  }
}

double seconds_of(c10::Device device, const std::function<void()>& work) {
  wait_for(device);
  const auto start = std::chrono::steady_clock::now();
  work();
  wait_for(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double busy_seconds_of(c10::Device device, const std::function<void()>& work) {
  if (!device.is_cpu()) {
    return seconds_of(device, work);
  }
  const std::clock_t start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

Spread spread_of(const std::vector<double>& values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {chart::median(values), *low, *high};
}

Turns take_turns(const std::vector<std::function<double()>>& programs, int64_t rounds) {
  const size_t count = programs.size();
  for (const auto& program : programs) {
    program();
  }
  std::vector<std::vector<double>> times(count);
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const size_t turn = round % 2 == 0 ? i : count - 1 - i;
      times[turn].push_back(programs[turn]());
    }
  }
  return Turns(std::move(times));
}

Spread Turns::seconds(size_t program) const { return spread_of(times_[program]); }

Spread Turns::ratio(size_t program, size_t to) const {
  std::vector<double> ratios;
  std::transform(times_[program].begin(), times_[program].end(), times_[to].begin(), std::back_inserter(ratios),
                 std::divides<>());
  return spread_of(ratios);
}

std::string str(const Spread& spread) {
  return fmt::format("{:.2f} ({:.2f} to {:.2f})", spread.median, spread.low, spread.high);
}

void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    at::Tensor(parameter).mutable_grad() = at::Tensor();
  }
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : at::Tensor());
  }
  return gradients;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.detach().cpu().contiguous().flatten().view(at::kByte);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() && y.defined()
               ? x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() && bits(x).equal(bits(y))
               : x.defined() == y.defined();
  });
}

StepBytes bytes_of_step(const std::vector<at::Tensor>& parameters, const std::function<void()>& step) {
  drop_gradients(parameters);
  const MemoryMeter meter(parameters.front().device());
  step();
  const int64_t peak = meter.report().peak_bytes;
  return {peak, peak - bytes_of(parameters)};
}

bool fits(c10::Device device, int64_t bytes, const std::function<void()>& work) {
  if (MemoryLimit::smallest(device).count() > bytes) {
    return false;
  }
  const MemoryLimit limit(device, Bytes(bytes));
  try {
    work();
    return true;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  } catch (const BudgetExceeded&) {
    return false;
  }
}

int64_t largest(int64_t most, const std::function<bool(int64_t)>& works, int64_t expected) {
  int64_t good = 0, bad = most + 1;
  const auto is_good = [&](int64_t value) {
    const bool is = works(value);
    (is ? good : bad) = value;
    return is;
  };
  int64_t distance = 1;
  if (is_good(std::clamp<int64_t>(expected, 1, most))) {
    for (; good + distance < bad && is_good(good + distance); distance *= 2) {
    }
  } else {
    for (; bad - distance > good && !is_good(bad - distance); distance *= 2) {
    }
  }
  while (bad - good > 1) {
    is_good((good + bad) / 2);
  }
  return good;
}

std::string machine(c10::Device device) {
  std::ifstream info("/proc/cpuinfo");
  std::string name = "an unknown processor";
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  }
  const std::time_t now = std::time(nullptr);
  std::array<char, 16> date = {};
  std::strftime(date.data(), date.size(), "%Y-%m-%d", std::localtime(&now));
  return fmt::format("{} threads on {}, LibTorch {}, {}, device {}", at::get_num_threads(), name, TORCH_VERSION,
                     date.data(), device.str());
}

std::string bytes_text(int64_t bytes) { return Bytes(std::max<int64_t>(bytes, 0)).str(); }

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

}  // namespace snug::measure
