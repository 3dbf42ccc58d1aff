#include "snug/distributed/power_sgd.h"

#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/hash.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/distributed/process_group.h"

// The sum over ranks of a matrix M on each rank is approximated by P Q^T, with P = sum of M Q, made orthonormal, and Q
// = sum of M^T P.

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

// Views of the result of flat() for tensors like these.
Tensors parts_of(const at::Tensor& flat, const Tensors& like) {
  Tensors parts;
  int64_t offset = 0;
  for (const at::Tensor& tensor : like) {
    parts.push_back(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return parts;
}

bool is_finite(const at::Tensor& tensor) {
  return std::isfinite(at::linalg_vector_norm(tensor, std::numeric_limits<double>::infinity()).item<double>());
}

// The state of one parameter. It does not depend on the bucket, because buckets change.
struct State {
  at::Tensor parameter;  // lives as long, so that no other has its address
  at::Tensor error;      // what the last step lost, on this rank
  at::Tensor q;
};

// The communication of one bucket between start and end.
struct Flight {
  Tensors plain;               // views of the gradients
  Tensors matrices;            // views of the gradients, [n, m]
  std::vector<State*> states;  // by matrix
  Tensors p;                   // by matrix, views of flat_p
  Tensors q;                   // likewise
  at::Tensor flat_plain;
  at::Tensor flat_p;
  at::Tensor flat_q;
  std::vector<std::function<void()>> waits;
};

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(PowerSgdOptions options)
      : options_(options), generator_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {}

  std::function<void()> start(const GradientBucket& bucket, ProcessGroup& group) {
    const at::NoGradGuard no_grad;
    const int64_t pass = pass_ + (bucket.index == 0 ? 1 : 0);
    auto end =
        pass <= options_.start_step ? group.start_all_reduce(bucket.gradients) : start_products(bucket, pass, group);
    pass_ = pass;  // not before: a bucket for which there was no memory comes again
    return end;
  }

 private:
  // All tensors to send are allocated before the first is sent. Random numbers depend on the pass, bucket and matrix: a
  // bucket that comes again draws the same ones again.
  std::function<void()> start_products(const GradientBucket& bucket, int64_t pass, ProcessGroup& group) {
    auto flight = std::make_shared<Flight>(cut(bucket));
    for (size_t i = 0; i < flight->matrices.size(); ++i) {
      const at::Tensor& matrix = flight->matrices[i];
      State& state = *flight->states[i];
      generator_.set_current_seed(c10::get_hash(options_.seed, pass, bucket.index, i));
      prepare(state, matrix);
      if (options_.error_feedback) {
        matrix.add_(state.error);
      }
      flight->p.push_back(at::matmul(matrix, state.q));
      flight->q.push_back(state.q);
    }
    flight->flat_plain = flat(flight->plain);
    flight->flat_p = flat(flight->p);
    flight->flat_q = flat(flight->q);
    flight->p = parts_of(flight->flat_p, flight->p);
    flight->q = parts_of(flight->flat_q, flight->q);
    for (const at::Tensor& sent : {flight->flat_plain, flight->flat_p}) {
      if (sent.defined()) {
        flight->waits.push_back(group.start_all_reduce(sent));
      }
    }
    return [self = shared_from_this(), flight, &group] { self->end(*flight, group); };
  }

  Flight cut(const GradientBucket& bucket) {
    Flight flight;
    int64_t offset = 0;
    for (const at::Tensor& parameter : bucket.parameters) {
      const at::Tensor view = bucket.gradients.narrow(0, offset, parameter.numel());
      offset += parameter.numel();
      const int64_t n = parameter.dim() == 0 ? 1 : parameter.size(0);
      const int64_t m = n == 0 ? 0 : parameter.numel() / n;
      const auto sent = static_cast<double>(options_.rank * (n + m));
      if (sent * options_.min_compression < static_cast<double>(n * m)) {
        State& state = states_[parameter.unsafeGetTensorImpl()];
        state.parameter = parameter;
        flight.matrices.push_back(view.view({n, m}));
        flight.states.push_back(&state);
      } else {
        flight.plain.push_back(view);
      }
    }
    return flight;
  }

  void prepare(State& state, const at::Tensor& matrix) {
    if (options_.error_feedback && !state.error.defined()) {
      state.error = at::zeros_like(matrix);
    }
    if (!options_.warm_start || !state.q.defined()) {
      const at::Tensor random = at::randn({matrix.size(1), options_.rank}, generator_, at::kFloat);
      state.q = std::get<0>(at::linalg_qr(random)).to(matrix.options());
    }
  }

  void end(const Flight& flight, ProcessGroup& group) const {
    const at::NoGradGuard no_grad;
    for (const auto& wait : flight.waits) {
      wait();
    }
    const Tensors sums = parts_of(flight.flat_plain, flight.plain);
    for (size_t i = 0; i < sums.size(); ++i) {
      flight.plain[i].copy_(sums[i]);
    }
    if (flight.matrices.empty()) {
      return;
    }
    multiply_back(flight, group);
    for (size_t i = 0; i < flight.matrices.size(); ++i) {
      finish(flight.matrices[i], flight.p[i], flight.q[i], *flight.states[i], group.size());
    }
  }

  // The others wait for this rank even if it has no memory for its part: the sum is then that of the other ranks.
  static void multiply_back(const Flight& flight, ProcessGroup& group) {
    std::exception_ptr failure;
    try {
      for (size_t i = 0; i < flight.matrices.size(); ++i) {
        flight.p[i].copy_(std::get<0>(at::linalg_qr(flight.p[i].to(at::kFloat))));
        flight.q[i].copy_(at::matmul(flight.matrices[i].t(), flight.p[i]));
      }
    } catch (...) {
      failure = std::current_exception();
      flight.flat_q.zero_();
    }
    group.all_reduce(flight.flat_q);
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  // A residual that is not finite would stay so in all later steps.
  void finish(const at::Tensor& matrix, const at::Tensor& p, const at::Tensor& q, State& state, int ranks) const {
    const at::Tensor sum = at::matmul(p, q.t());
    if (options_.error_feedback) {  // of the sum, this rank is to make up for its share
      state.error.copy_(matrix).sub_(sum, 1.0 / ranks);
      if (!is_finite(state.error)) {
        state.error.zero_();
      }
    }
    matrix.copy_(sum);
    state.q = is_finite(q) ? q : at::Tensor();
  }

  PowerSgdOptions options_;
  at::Generator generator_;
  int64_t pass_ = 0;  // that buckets came of last, counted from 1
  std::unordered_map<const c10::TensorImpl*, State> states_;
};

}  // namespace

CommHook power_sgd_hook(PowerSgdOptions options) {
  if (options.rank < 1 || options.start_step < 0 || !(options.min_compression >= 1)) {
    throw ConfigError(fmt::format(
        "power_sgd_hook: rank is {}, start_step {} and min_compression {}; they must be at least 1, 0 and 1",
        options.rank, options.start_step, options.min_compression));
  }
  return [state = std::make_shared<PowerSgd>(options)](const GradientBucket& bucket, ProcessGroup& group) {
    return state->start(bucket, group);
  };
}

}  // namespace snug
