#include "src/distributed/rank_writers.h"

#include "snug/core.h"

namespace snug {
namespace detail {

void RankWriters::begin() {
  for (KeptOnRanks* const kept : group_.impl().kept) {
    kept->begin_save();
    begun_.push_back(kept);
  }
}

RankWriters::~RankWriters() {
  for (KeptOnRanks* const kept : begun_) {
    kept->end_save();
  }
}

std::vector<Writers::Part> RankWriters::parts_of(const at::Tensor& tensor) const {
  for (const KeptOnRanks* const kept : begun_) {
    if (std::vector<Part> parts = kept->parts_of(tensor); !parts.empty()) {
      return parts;
    }
  }
  return {{static_cast<int64_t>(tensor.nbytes()), is_first() ? tensor : at::Tensor()}};
}

void RankWriters::agree(const std::exception_ptr& failure) {
  if (has_another_failed(group_, failure)) {
    throw DistributedError(
        "ProcessGroup.save_together: another rank failed; its own message is on its standard error. All ranks must see "
        "the folder");
  }
}

}  // namespace detail

void ProcessGroup::save_together(const std::function<void()>& save) {
  detail::RankWriters writers(*this);
  writers.begin();
  writers.together([&] {
    const detail::WritingTogether together(writers);
    save();
  });
}

}  // namespace snug
