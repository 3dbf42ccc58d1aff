#include "snug/distributed/detail/replicas.h"

#include <cstdint>
#include <cstring>
#include <exception>

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug::detail {
namespace {

// Any changed bit gives another checksum for certain, as every round is a bijection of the state; several do but for one case in 2^64. The
// mixing is splitmix64's (see data/sampler.cpp).
int64_t checksum(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.detach().cpu().contiguous();
  const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  uint64_t sum = bytes.nbytes();
  for (size_t i = 0; i < bytes.nbytes(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, std::min(sizeof(word), bytes.nbytes() - i));
    sum = (sum ^ word) * 0xbf58476d1ce4e5b9;
    sum ^= sum >> 29;
  }
  return static_cast<int64_t>(sum);
}

}  // namespace

void check_replicas(ProcessGroup& group, const DataParallel::NamedTensors& tensors) {
  // The last number is of a rank that has failed, for which the others are not to wait.
  const at::Tensor own = at::zeros({static_cast<int64_t>(tensors.size()) + 1}, at::kLong);
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      own.mutable_data_ptr<int64_t>()[i] = checksum(tensors[i].second);
    }
  } catch (...) {
    failure = std::current_exception();
    own[-1] = 1;
  }
  const at::Tensor least = own.clone();
  const at::Tensor most = own.clone();
  group.all_reduce(least, ReduceOp::Min);
  group.all_reduce(most, ReduceOp::Max);
  if (failure) {
    std::rethrow_exception(failure);
  }
  if (most[-1].item<int64_t>() != 0) {
    throw DistributedError("DataParallel.check_replicas: another rank could not read its parameters; see what it says");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (least[index].item<int64_t>() == most[index].item<int64_t>()) {
      continue;
    }
    const at::Tensor all = group.all_gather(own[index]);
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
