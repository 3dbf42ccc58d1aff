#pragma once
// RankWriters: the ranks of a group, which write each snapshot and each safetensors file together.

#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "src/core/writers.h"
#include "src/distributed/process_group_impl.h"

namespace snug::detail {

/// Tensors of which each rank keeps parts. The objects of a group are made in the same order on all ranks, and end
/// before the group.
class KeptOnRanks {
 public:
  explicit KeptOnRanks(ProcessGroup& group) : group_(group) { group.impl().kept.push_back(this); }
  virtual ~KeptOnRanks() { std::erase(group_.impl().kept, this); }
  KeptOnRanks(const KeptOnRanks&) = delete;
  KeptOnRanks& operator=(const KeptOnRanks&) = delete;

  /// Around the calls of parts_of(); all ranks call begin_save() together.
  virtual void begin_save(Writers& /*writers*/) {}
  virtual void end_save() noexcept {}
  /// See Writers::parts_of. Empty: the tensor is not one of these.
  virtual std::vector<Writers::Part> parts_of(const at::Tensor& tensor) const = 0;

 private:
  ProcessGroup& group_;
};

class RankWriters final : public Writers {
 public:
  explicit RankWriters(ProcessGroup& group) : group_(group) {}
  ~RankWriters() override;
  RankWriters(const RankWriters&) = delete;
  RankWriters& operator=(const RankWriters&) = delete;

  /// Called on all ranks, once. Throws on all ranks.
  void begin();

  bool is_first() const override { return group_.rank() == 0; }
  std::vector<Part> parts_of(const at::Tensor& tensor) const override;
  void add_up(std::span<int64_t> numbers) override;
  /// After the first failure nothing is exchanged: the ranks would be at different places of the save.
  void agree(const std::exception_ptr& failure) override;

 private:
  ProcessGroup& group_;
  bool has_failed_ = false;
};

}  // namespace snug::detail
