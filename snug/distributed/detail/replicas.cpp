#include "snug/distributed/detail/replicas.h"

#include <cstdint>
#include <cstring>
#include <exception>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
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
  std::vector<int64_t> own(tensors.size() + 1);
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      own[i] = checksum(tensors[i].second);
    }
  } catch (...) {
    failure = std::current_exception();
    own.back() = 1;
  }
  std::vector<int64_t> least = own, most = own;
  const auto size = static_cast<int64_t>(own.size());
  group.all_reduce(at::from_blob(least.data(), {size}, at::kLong), ReduceOp::Min);
  group.all_reduce(at::from_blob(most.data(), {size}, at::kLong), ReduceOp::Max);
  if (failure) {
    std::rethrow_exception(failure);
  }
  if (most.back() != 0) {
    throw DistributedError(
        "DataParallel.check_replicas: another rank could not read its parameters; its own message is on its standard "
        "error");
  }
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
