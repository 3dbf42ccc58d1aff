#pragma once
// RankedStep: StepRanks over the ranks of a DataParallel. ranked_step.cpp opens with how a rank fails.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "src/distributed/rank_verdict.h"
#include "src/step/step_ranks.h"

namespace snug::detail {

class RankedStep final : public StepRanks {
 public:
  /// Throws ConfigError if `parallel` is of another model, without these parameters.
  RankedStep(DataParallel& parallel, const std::vector<at::Tensor>& of_model);

  bool is_alone() const override { return false; }
  int64_t rank() const override;
  int64_t size() const override;
  const torch::optim::Optimizer* optimizer_of_shards() const override;
  std::string explain_shards() const override;
  PlacedBytes weights_of_others() const override;
  int64_t widen_window(int64_t spare) override;
  int64_t spare() const override;
  bool can_shard_weights() const override;
  bool has_weight_shards() const override;
  void shard_weights() override;
  bool are(const ProcessGroup* group) const override;
  std::shared_ptr<void> rehearse() const override;
  int64_t bucket_bytes() const override;
  int64_t from_rank_zero(int64_t value) const override;
  Bytes smallest_budget(Bytes own, bool plans) const override;
  void make_all_fit(Bytes budget, const std::function<int64_t()>& live, const std::exception_ptr& failure) override;
  std::function<void(const at::Tensor&)> agreement() override;

  void open(uint32_t trained) override;
  void begin_split() override { stage_ = Stage::Splitting; }
  AgreedSplit agree_on_split(const RankSplit& own) override;
  void begin(bool has_masters) override;
  void agree_on_passes(const torch::nn::Module& model, int64_t micro_batches) override;
  bool is_agreed() const override { return stage_ != Stage::Begun; }
  double agree_on_items(double items) override;
  at::Tensor forward(const std::function<at::Tensor()>& loss_of) override { return parallel_.forward(loss_of); }
  std::shared_ptr<void> quiet_unless(bool is_last) override;
  void send_the_rest(const NamedTensors& all) override;
  void sum(double& items, at::Tensor& sums, std::vector<std::string>& metrics, int64_t& batch_items) override;
  at::Tensor clip(const std::vector<at::Tensor>& updated, double max_norm) override;
  void confirm_writing() override;
  void written() override { stage_ = Stage::Written; }
  void check_replicas() const override { parallel_.check_replicas(); }
  void end(StepResult& result) override;

  bool is_dropped() const override { return heard_.has_value(); }
  void catch_up() override { is_left_behind_ = false; }
  bool fail(RankFailure failure, const NamedTensors& all, Bytes smallest) override;
  void lose_group() override;

 private:
  enum class Stage { Outside, Splitting, Begun, Agreed, Sent, Writing, Written };
  using Words = std::vector<RankWord>;

  std::vector<int64_t> gather(const std::vector<int64_t>& own) const;
  Words exchange(const RankWord& own) const;
  Words talk(Talk about, const RankWord& own);
  [[noreturn]] void drop(const std::string& why);
  void check_trained(const Words& words);
  void agree_on_metrics(const Words& words, std::vector<std::string>& metrics);
  void go_along(Stage stage, const NamedTensors& all);
  std::vector<at::Tensor> others(const NamedTensors& all) const;
  void send_others(const NamedTensors& all);

  DataParallel& parallel_;
  uint32_t trained_ = 0;
  bool has_masters_ = false;
  Stage stage_ = Stage::Outside;
  std::optional<Verdict> heard_;  // why the other ranks have given up this step
  bool is_left_behind_ = false;   // the other ranks made a step, and this rank did not
  int64_t bytes_of_others_ = 0;
  int64_t bytes_before_ = 0;
  DataParallel::CommunicationTime time_before_;
};

}  // namespace snug::detail
