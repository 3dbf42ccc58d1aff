#include "src/distributed/rank_writers.h"

#include <fmt/format.h>

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
  if (has_failed_) {  // the other ranks know
    if (failure) {
      std::rethrow_exception(failure);
    }
    throw DistributedError("ProcessGroup.save_together: the ranks have ended this save; an earlier error says why");
  }
  has_failed_ = true;
  if (const auto rank = failed_rank(group_, failure)) {
    throw DistributedError(
        fmt::format("ProcessGroup.save_together: rank {} failed; its own message is on its standard error", *rank));
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
