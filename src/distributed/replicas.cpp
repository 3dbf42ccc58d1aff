#include "src/distributed/replicas.h"

#include <cstdint>
#include <exception>

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

void check_replicas(ProcessGroup& group, const DataParallel::NamedTensors& tensors) {
  std::vector<int64_t> own(tensors.size());
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      own[i] = checksum(tensors[i].second);
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
  all_reduce(group, least, ReduceOp::Min);
  all_reduce(group, most, ReduceOp::Max);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (least[i] == most[i]) {
      continue;
    }
    const at::Tensor all = group.all_gather(at::scalar_tensor(own[i], at::kLong));
    int64_t rank = 1;
    while (all[rank].item<int64_t>() == all[0].item<int64_t>()) {
      ++rank;
    }
    throw DistributedError(fmt::format(
        "DataParallel.check_replicas: parameter '{}' is not the same on all ranks: rank {} has other values "
        "than rank 0; did one of them alone write to it? Go on from a snapshot",
        tensors[i].first, rank));
  }
}

}  // namespace snug::detail
