#include "snug/distributed/power_sgd.h"

#include <map>
#include <memory>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/distributed/process_group.h"

// Of a matrix M on each rank the sum over ranks is approximated by P Q^T: P = sum of M Q, made orthonormal; Q = sum of M^T P.

namespace snug {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor flat(const Tensors& tensors) {
  Tensors parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(tensor.reshape({-1}));
  }
  return parts.empty() ? at::Tensor() : at::cat(parts);
}

// The inverse of flat().
void copy_from_flat(const at::Tensor& from, const Tensors& to) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : to) {
    tensor.copy_(from.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

struct Bucket {
  int64_t step = 0;
  at::Tensor error;  // what the last step lost, on this rank
  Tensors q;         // by matrix
};

// What is under way between start and end of one bucket's communication.
struct Flight {
  at::Tensor gradients;
  Tensors plain;     // views of gradients
  Tensors matrices;  // views of gradients, [n, m]
  Tensors p;
  at::Tensor flat_plain;
  at::Tensor flat_p;
  std::vector<std::function<void()>> waits;
};

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(PowerSgdOptions options)
      : options_(options), generator_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {}

  std::function<void()> start(const GradientBucket& bucket, ProcessGroup& group) {
    const at::NoGradGuard no_grad;
    Bucket& state = buckets_[bucket.index];
    if (state.step++ < options_.start_step) {
      return group.start_all_reduce(bucket.gradients);
    }
    add_error(bucket, state);
    auto flight = std::make_shared<Flight>(cut(bucket));
    choose_q(state, flight->matrices);
    for (size_t i = 0; i < flight->matrices.size(); ++i) {
      flight->p.push_back(at::matmul(flight->matrices[i], state.q[i]));
    }
    flight->flat_plain = flat(flight->plain);
    flight->flat_p = flat(flight->p);
    for (const at::Tensor& sent : {flight->flat_plain, flight->flat_p}) {
      if (sent.defined()) {
        flight->waits.push_back(group.start_all_reduce(sent));
      }
    }
    return [self = shared_from_this(), flight, index = bucket.index, &group] {
      self->end(*flight, self->buckets_.at(index), group);
    };
  }

 private:
  void add_error(const GradientBucket& bucket, Bucket& state) const {
    if (!options_.error_feedback) {
      return;
    }
    if (!state.error.defined()) {
      state.error = at::zeros_like(bucket.gradients);
    } else if (state.error.numel() != bucket.gradients.numel()) {
      throw ConfigError(
          "power_sgd_hook: the buckets have changed; is the hook shared by two DataParallels? give each its own");
    }
    bucket.gradients.add_(state.error);
    state.error.copy_(bucket.gradients);
  }

  Flight cut(const GradientBucket& bucket) const {
    Flight flight{.gradients = bucket.gradients};
    int64_t offset = 0;
    for (const at::Tensor& parameter : bucket.parameters) {
      const at::Tensor view = bucket.gradients.narrow(0, offset, parameter.numel());
      offset += parameter.numel();
      const int64_t n = parameter.dim() == 0 ? 1 : parameter.size(0);
      const int64_t m = n == 0 ? 0 : parameter.numel() / n;
      const auto sent = static_cast<double>(options_.rank * (n + m));
      if (sent * options_.min_compression < static_cast<double>(n * m)) {
        flight.matrices.push_back(view.view({n, m}));
      } else {
        flight.plain.push_back(view);
      }
    }
    return flight;
  }

  void choose_q(Bucket& state, const Tensors& matrices) {
    if (options_.warm_start && !state.q.empty()) {
      return;
    }
    state.q.clear();
    for (const at::Tensor& matrix : matrices) {
      const at::Tensor random = at::randn({matrix.size(1), options_.rank}, generator_, at::kFloat);
      state.q.push_back(std::get<0>(at::linalg_qr(random)).to(matrix.scalar_type()));
    }
  }

  void end(Flight& flight, Bucket& state, ProcessGroup& group) const {
    const at::NoGradGuard no_grad;
    for (const auto& wait : flight.waits) {
      wait();
    }
    if (flight.flat_plain.defined()) {
      copy_from_flat(flight.flat_plain, flight.plain);
    }
    if (flight.flat_p.defined()) {
      multiply_back(flight, state, group);
    }
    if (options_.error_feedback) {  // of the sum, this rank is to make up for its share
      state.error.sub_(flight.gradients, 1.0 / group.size());
      for_plain_parts(flight, state);
    }
  }

  void multiply_back(Flight& flight, Bucket& state, ProcessGroup& group) const {
    copy_from_flat(flight.flat_p, flight.p);
    for (size_t i = 0; i < flight.p.size(); ++i) {
      flight.p[i] = std::get<0>(at::linalg_qr(flight.p[i].to(at::kFloat))).to(flight.p[i].scalar_type());
      state.q[i] = at::matmul(flight.matrices[i].t(), flight.p[i]);
    }
    const at::Tensor flat_q = flat(state.q);
    group.all_reduce(flat_q);
    copy_from_flat(flat_q, state.q);
    for (size_t i = 0; i < flight.p.size(); ++i) {
      flight.matrices[i].copy_(at::matmul(flight.p[i], state.q[i].t()));
    }
  }

  // Nothing is lost of what travels as it is.
  static void for_plain_parts(const Flight& flight, const Bucket& state) {
    for (const at::Tensor& part : flight.plain) {
      state.error.narrow(0, part.storage_offset() - flight.gradients.storage_offset(), part.numel()).zero_();
    }
  }

  PowerSgdOptions options_;
  at::Generator generator_;
  std::map<size_t, Bucket> buckets_;
};

}  // namespace

CommHook power_sgd_hook(PowerSgdOptions options) {
  if (options.rank < 1 || options.start_step < 2 || !(options.min_compression >= 1)) {
    throw ConfigError(fmt::format(
        "power_sgd_hook: rank is {}, start_step {} and min_compression {}; they must be at least 1, 2 and 1",
        options.rank, options.start_step, options.min_compression));
  }
  return [state = std::make_shared<PowerSgd>(options)](const GradientBucket& bucket, ProcessGroup& group) {
    return state->start(bucket, group);
  };
}

}  // namespace snug
