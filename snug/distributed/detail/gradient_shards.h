#pragma once
// GradientShards: adds up gradients over the ranks during backward, keeps this rank's pieces of the sum, and frees the rest.

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "snug/core/detail/gradient_hooks.h"
#include "snug/distributed/sharded_optimizer.h"

namespace snug::detail {

class GradientShards final {
 public:
  /// A piece that this rank keeps: its elements' gradients go to `view`, which is a 1-D tensor or shaped as the parameter.
  struct Own {
    size_t parameter;
    int64_t begin;
    int64_t end;
    at::Tensor view;
  };

  /// Throws ConfigError, naming the parameter by number, if something else wants to see its gradient.
  GradientShards(std::vector<at::Tensor> parameters, std::vector<Own> own, std::shared_ptr<ProcessGroup> group,
                 GradientSharding options);
  GradientShards(const GradientShards&) = delete;
  GradientShards& operator=(const GradientShards&) = delete;

 private:
  struct Bucket {
    std::vector<size_t> parameters;
    size_t missing = 0;
  };
  struct Sent {
    const Bucket* bucket;
    at::Tensor sum;
    std::function<void()> wait;
  };

  void make_buckets();
  std::vector<bool> trained_now() const;
  void take_gradient(size_t parameter);
  void begin_pass();
  void end_pass();
  void send(const Bucket& bucket);
  void finish_one();

  std::vector<at::Tensor> parameters_;
  std::vector<Own> own_;
  std::shared_ptr<ProcessGroup> group_;
  GradientSharding options_;
  std::vector<bool> is_trained_;  // in the last pass: of these are the buckets
  std::vector<size_t> bucket_of_;
  std::vector<Bucket> buckets_;
  size_t next_ = 0;             // the next bucket to be sent: in the same order on all ranks
  int pass_ = -1;               // the backward pass that runs
  std::weak_ptr<int> running_;  // lives as long as that does
  std::deque<Sent> sent_;       // not ended yet
  GradientHooks hooks_;
};

}  // namespace snug::detail
