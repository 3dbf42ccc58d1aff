#include "src/optim/low_precision_adamw.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ATen.h>

#include "src/core/allocated_bytes.h"
#include "src/core/parallel.h"
#include "src/kernels/master_adamw.h"
#include "src/kernels/random_bits.h"
#include "src/optim/adam_rules.h"

// On the CPU, and on devices with kernels of snug's own (has_device_update), one pass over memory suffices. On other
// devices torch's FP32 kernel works on masters, or on FP32 copies, and the results are rounded. The copies take little
// memory, because only some elements are copied at a time.

namespace snug::detail {
namespace {

template <class Low>
void update_part(const AdamWUpdate& u, const kernels::AdamWStep& step, size_t i, int64_t begin, int64_t end) {
  auto* parameter = static_cast<Low*>(u.parameters[i].mutable_data_ptr()) + begin;
  const auto* gradient = static_cast<const Low*>(u.gradients[i].const_data_ptr()) + begin;
  auto* exp_avg = u.exp_avgs[i].mutable_data_ptr<float>() + begin;
  auto* exp_avg_sq = u.exp_avg_sqs[i].mutable_data_ptr<float>() + begin;
  if (!u.masters.empty()) {
    kernels::master_adamw_update(step, u.masters[i].mutable_data_ptr<float>() + begin, parameter, gradient, exp_avg,
                                 exp_avg_sq, end - begin);
  } else if constexpr (std::is_same_v<Low, kernels::BFloat16>) {
    const kernels::RandomKey key{.step = static_cast<uint64_t>(u.steps[i].item<double>()),
                                 .offset = u.first_elements[i] + static_cast<uint64_t>(begin)};
    kernels::stochastic_adamw_update(step, key, parameter, gradient, exp_avg, exp_avg_sq, end - begin);
  }
}

void update_on_cpu(const AdamWUpdate& u) {
  std::vector<int64_t> counts;
  std::vector<kernels::AdamWStep> steps;
  for (size_t i = 0; i < u.parameters.size(); ++i) {
    counts.push_back(u.parameters[i].numel());
    steps.push_back(kernel_step(u.options, u.steps[i].item<double>(), u.grad_scale));
  }
  constexpr int64_t kGrain = 1 << 14;
  parallel_for(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) {
    if (u.parameters[i].scalar_type() == at::kHalf) {
      update_part<kernels::Float16>(u, steps[i], i, begin, end);
    } else {
      update_part<kernels::BFloat16>(u, steps[i], i, begin, end);
    }
  });
}

// x ^ (x >> shift), of unsigned numbers. `scratch` is as large as x.
void xor_shifted(at::Tensor& x, at::Tensor& scratch, int shift, int bits) {
  at::bitwise_right_shift_out(scratch, x, shift);
  x.bitwise_xor_(scratch.bitwise_and_((int64_t{1} << (bits - shift)) - 1));
}

// kernels::detail::mix64 and mix32 in a tensor's arithmetic, which wraps around.
void mix64(at::Tensor& x) {
  at::Tensor scratch = at::empty_like(x);
  xor_shifted(x, scratch, 30, 64);
  x.mul_(static_cast<int64_t>(kernels::detail::kMultiplier64A));
  xor_shifted(x, scratch, 27, 64);
  x.mul_(static_cast<int64_t>(kernels::detail::kMultiplier64B));
  xor_shifted(x, scratch, 31, 64);
}

void mix32(at::Tensor& x, at::Tensor& scratch) {
  xor_shifted(x, scratch, 16, 32);
  x.mul_(static_cast<int32_t>(kernels::detail::kMultiplier1));
  xor_shifted(x, scratch, 15, 32);
  x.mul_(static_cast<int32_t>(kernels::detail::kMultiplier2));
  xor_shifted(x, scratch, 16, 32);
}

// The keys of a parameter's random numbers. Elements whose numbers have the same upper half share a key.
class NoiseKeys {
 public:
  NoiseKeys(const at::Tensor& step, uint64_t first, int64_t count) : first_half_(first >> 32) {
    const auto golden = static_cast<int64_t>(kernels::detail::kGolden);
    const uint64_t last_half = (first + static_cast<uint64_t>(std::max<int64_t>(count, 1)) - 1) >> 32;
    for (uint64_t half = first_half_; half <= last_half; ++half) {
      at::Tensor key = step.to(at::kLong) + static_cast<int64_t>(kernels::detail::mix64(kernels::detail::kGolden));
      mix64(key.add_(golden));
      mix64(key.add_(static_cast<int64_t>(half)).add_(golden));
      keys_.emplace_back(key.to(at::kInt), key.bitwise_right_shift(32).to(at::kInt));
    }
  }

  // Writes the keys of the elements from number `first` on. Allocates nothing.
  void write(at::Tensor noise, at::Tensor scratch, uint64_t first) const {
    const int64_t count = noise.numel();
    at::arange_out(noise, count);
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      const uint64_t number = first + static_cast<uint64_t>(begin);
      const uint64_t left = (uint64_t{1} << 32) - (number & 0xFFFFFFFF);
      end = begin + static_cast<int64_t>(std::min(left, static_cast<uint64_t>(count - begin)));
      const auto& [low, high] = keys_[(number >> 32) - first_half_];
      at::Tensor some = noise.slice(0, begin, end), some_scratch = scratch.slice(0, begin, end);
      some.add_(static_cast<int32_t>(static_cast<uint32_t>(number) - static_cast<uint32_t>(begin)));
      mix32(some.bitwise_xor_(low), some_scratch);
      mix32(some.add_(high), some_scratch);
    }
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF);
  }

 private:
  uint64_t first_half_;
  std::vector<std::pair<at::Tensor, at::Tensor>> keys_;
};

// --- on other devices: some elements at a time, in a workspace

constexpr int64_t kLowAtOnce = int64_t{4} << 20;

// FP32 or int: `numbers` for each element, and for more than one number also a byte for a flag.
struct LowWorkspace {
  std::vector<at::Tensor> numbers;
  at::Tensor flags;

  static int64_t numbers_of(bool has_masters) { return has_masters ? 1 : 4; }
  LowWorkspace(int64_t elements, bool has_masters, const at::TensorOptions& options) {
    for (int64_t i = 0; i < numbers_of(has_masters); ++i) {
      numbers.push_back(at::empty({elements}, options.dtype(i < 2 ? at::kFloat : at::kInt)));
    }
    if (!has_masters) {
      flags = at::empty({elements}, options.dtype(at::kBool));
    }
  }
};

// Elements begin to end - 1 of parameter i, in the order of memory. In the workspace the elements begin at `place`.
struct LowPiece {
  size_t i;
  int64_t begin, end, place;

  at::Tensor of(const std::vector<at::Tensor>& tensors) const {
    return tensors[i].as_strided({end - begin}, {1}, tensors[i].storage_offset() + begin);
  }
  at::Tensor in(const at::Tensor& workspace) const { return workspace.narrow(0, place, end - begin); }
};

std::vector<std::vector<LowPiece>> batches_of(const std::vector<at::Tensor>& parameters) {
  std::vector<std::vector<LowPiece>> batches;
  int64_t used = kLowAtOnce;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (int64_t begin = 0, end = 0; begin < parameters[i].numel(); begin = end) {
      if (used == kLowAtOnce) {
        batches.emplace_back();
        used = 0;
      }
      end = std::min(parameters[i].numel(), begin + kLowAtOnce - used);
      batches.back().push_back({i, begin, end, used});
      used += end - begin;
    }
  }
  return batches;
}

std::vector<at::Tensor> parts_of_all(const std::vector<LowPiece>& pieces, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const LowPiece& piece : pieces) {
    parts.push_back(piece.of(tensors));
  }
  return parts;
}

// The tensors' elements as FP32 numbers in `workspace`.
std::vector<at::Tensor> wide_copies(const std::vector<LowPiece>& pieces, const std::vector<at::Tensor>& tensors,
                                    const at::Tensor& workspace) {
  std::vector<at::Tensor> wide;
  for (const LowPiece& piece : pieces) {
    wide.push_back(piece.in(workspace).copy_(piece.of(tensors)));
  }
  return wide;
}

void update_wide(const AdamWUpdate& u, const std::vector<LowPiece>& pieces, const std::vector<at::Tensor>& weights,
                 const at::Tensor& workspace) {
  std::vector<at::Tensor> steps;
  for (const LowPiece& piece : pieces) {
    steps.push_back(u.steps[piece.i]);
  }
  const auto [beta1, beta2] = u.options.betas();
  at::_fused_adamw_(weights, wide_copies(pieces, u.gradients, workspace), parts_of_all(pieces, u.exp_avgs),
                    parts_of_all(pieces, u.exp_avg_sqs), /*max_exp_avg_sqs=*/{}, steps, u.options.lr(), beta1, beta2,
                    u.options.weight_decay(), u.options.eps(), /*amsgrad=*/false, /*maximize=*/false,
                    if_defined(u.grad_scale), if_defined(u.found_inf));
}

// Rounds to BF16: adds a random 16-bit number below BF16's last place, and cuts off all lower bits. The probability of
// rounding up is the fraction that is cut off.
void round_at_random(const at::Tensor& wide, const at::Tensor& noise, at::Tensor is_nan, at::Tensor parameter) {
  parameter.copy_(noise.add_(wide.view(at::kInt)).bitwise_and_(-(1 << 16)).view(at::kFloat));
  at::ne_out(is_nan, wide, wide);
  parameter.masked_fill_(is_nan, std::numeric_limits<double>::quiet_NaN());  // the addition overflows for NaN
}

std::function<void()> prepare_elsewhere(AdamWUpdate update) {
  const bool has_masters = !update.masters.empty();
  int64_t elements = 0;
  std::vector<NoiseKeys> keys;
  for (size_t i = 0; i < update.parameters.size(); ++i) {
    elements += update.parameters[i].numel();
    if (!has_masters) {
      keys.emplace_back(update.steps[i], update.first_elements[i], update.parameters[i].numel());
    }
  }
  LowWorkspace workspace(std::min(elements, kLowAtOnce), has_masters, update.exp_avgs.front().options());
  return [update = std::move(update), keys = std::move(keys), workspace = std::move(workspace), has_masters] {
    for (const std::vector<LowPiece>& pieces : batches_of(update.parameters)) {
      if (has_masters) {
        const auto masters = parts_of_all(pieces, update.masters);
        update_wide(update, pieces, masters, workspace.numbers[0]);
        at::_foreach_copy_(parts_of_all(pieces, update.parameters), masters);
        continue;
      }
      const auto wide = wide_copies(pieces, update.parameters, workspace.numbers[1]);
      update_wide(update, pieces, wide, workspace.numbers[0]);
      for (size_t p = 0; p < pieces.size(); ++p) {
        const LowPiece& piece = pieces[p];
        const at::Tensor noise = piece.in(workspace.numbers[2]);
        keys[piece.i].write(noise, piece.in(workspace.numbers[3]),
                            update.first_elements[piece.i] + static_cast<uint64_t>(piece.begin));
        round_at_random(wide[p], noise, piece.in(workspace.flags), piece.of(update.parameters));
      }
    }
  };
}

}  // namespace

// The same numbers as RandomKeys.
at::Tensor rounding_noise(const at::Tensor& step, uint64_t first, int64_t count) {
  at::Tensor noise = at::empty({count}, step.options().dtype(at::kInt));
  NoiseKeys(step, first, count).write(noise, at::empty_like(noise), first);
  return noise;
}

int64_t low_precision_workspace_bytes(int64_t elements, int64_t parameters, bool has_masters, c10::Device device) {
  constexpr int64_t kNumber = 4;
  if (device.is_cpu() || parameters == 0) {
    return 0;
  }
  const int64_t scalar = allocated_bytes(kNumber, device);
  const int64_t counts = 2 * parameters * scalar;  // of steps, with and without this step
  if (has_device_update(device)) {
    return counts;
  }
  const int64_t at_once = std::min(elements, kLowAtOnce);
  return counts + 2 * parameters * scalar +  // two halves of a key
         LowWorkspace::numbers_of(has_masters) * allocated_bytes(kNumber * at_once, device) +
         (has_masters ? 0 : allocated_bytes(at_once, device));
}

std::function<void()> prepare_low_precision_adamw(AdamWUpdate update) {
  if (has_device_update(update.parameters.front().device())) {
    return [update = std::move(update)] { update_on_device(update); };
  }
  if (!update.parameters.front().is_cpu()) {
    return prepare_elsewhere(std::move(update));
  }
  if (update.found_inf.defined() && update.found_inf.item<float>() != 0) {
    return [] {};
  }
  return [update = std::move(update)] { update_on_cpu(update); };
}

}  // namespace snug::detail
