#include "src/distributed/replicas.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/bytes_hash.h"
#include "src/distributed/process_group_impl.h"

namespace snug::detail {
namespace {

int64_t checksum(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  return static_cast<int64_t>(bytes_hash(plain.const_data_ptr(), plain.nbytes()));
}

}  // namespace

void check_replicas(ProcessGroup& group, const DataParallel::NamedTensors& tensors, const Owners* owners) {
  std::vector<int64_t> own(tensors.size());
  const auto owner_of = [&](size_t i) { return owners == nullptr ? -1 : owners->of(tensors[i].second); };
  const auto is_here = [&](size_t i) { return owner_of(i) < 0 || owner_of(i) == owners->group().rank(); };
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      own[i] = is_here(i) ? checksum(tensors[i].second) : 0;
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (const auto rank = failed_rank(group, failure)) {
    throw DistributedError(fmt::format(
        "DataParallel.check_replicas: rank {} could not read its parameters; its own message is on its standard error",
        *rank));
  }
  std::vector<int64_t> least = own, most = own;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_here(i)) {
      least[i] = std::numeric_limits<int64_t>::max();
      most[i] = std::numeric_limits<int64_t>::min();
    }
  }
  all_reduce(group, least, ReduceOp::Min);
  all_reduce(group, most, ReduceOp::Max);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (least[i] == most[i]) {
      continue;
    }
    const at::Tensor all = group.all_gather(at::scalar_tensor(own[i], at::kLong));
    const int first = std::max(0, owner_of(i)), next = owner_of(i) < 0 ? 1 : owners->group().size();
    int rank = first + next;
    while (all[rank].item<int64_t>() == all[first].item<int64_t>()) {
      rank += next;
    }
    throw DistributedError(fmt::format(
        "DataParallel.check_replicas: parameter '{}' is not the same on all ranks: rank {} has other values "
        "than rank {}; did one of them alone write to it? Go on from a snapshot",
        tensors[i].first, rank, first));
  }
}

}  // namespace snug::detail
