#include "src/distributed/rank_writers.h"

#include "snug/core.h"

namespace snug {
namespace detail {

void RankWriters::begin() {
  for (KeptOnRanks* const kept : group_.impl().kept) {
    kept->begin_save(*this);
  }
}

RankWriters::~RankWriters() {
  for (KeptOnRanks* const kept : group_.impl().kept) {
    kept->end_save();
  }
}

std::vector<Writers::Part> RankWriters::parts_of(const at::Tensor& tensor) const {
  for (const KeptOnRanks* const kept : group_.impl().kept) {
    if (std::vector<Part> parts = kept->parts_of(tensor); !parts.empty()) {
      return parts;
    }
  }
  return {{static_cast<int64_t>(tensor.nbytes()), is_first() ? tensor : at::Tensor()}};
}

void RankWriters::add_up(std::span<int64_t> numbers) {
  agree({});
  has_failed_ = true;
  all_reduce(group_, numbers);
  has_failed_ = false;
}

void RankWriters::agree(const std::exception_ptr& failure) {
  constexpr const char* kAnother =
      "ProcessGroup.save_together: another rank failed; its own message is on its standard error";
  if (has_failed_) {  // the other ranks know
    if (failure) {
      std::rethrow_exception(failure);
    }
    throw DistributedError(kAnother);
  }
  has_failed_ = true;
  if (has_another_failed(group_, failure)) {
    throw DistributedError(kAnother);
  }
  has_failed_ = false;
}

}  // namespace detail

void ProcessGroup::save_together(const std::function<void()>& save) {
  if (detail::Writers::are_several()) {
    throw ConfigError("ProcessGroup.save_together: the call is inside of another save_together; call `save` itself");
  }
  detail::RankWriters writers(*this);
  writers.begin();
  writers.together([&] {
    const detail::WritingTogether together(writers);
    save();
  });
}

}  // namespace snug
